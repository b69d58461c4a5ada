"""The GPU side: Celery workers that run the journal's requests. It may import app; app never imports workers."""
