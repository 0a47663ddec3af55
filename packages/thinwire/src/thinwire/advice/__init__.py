"""`python -m thinwire advise`: will sparse gradients help my training, on my network?"""
