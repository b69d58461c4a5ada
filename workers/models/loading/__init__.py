"""Steps that transformers takes with each weight that it reads: it is quantised, or split over ranks."""
