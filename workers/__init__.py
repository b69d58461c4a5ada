"""The GPU side: Celery workers that run what the journal holds. May import app; app never imports this."""
