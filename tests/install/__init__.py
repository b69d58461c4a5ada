"""`make extras`: each extra of the wheel is installed alone in a fresh environment, outside the checkout, and used."""
