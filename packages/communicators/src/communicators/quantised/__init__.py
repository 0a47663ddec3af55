"""Dense sums in 8 or 4 bits an element, exact in what was sent: what is rounded off is given back."""
