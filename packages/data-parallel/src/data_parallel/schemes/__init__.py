"""One file a way in which the gradients of a bucket become their mean."""
