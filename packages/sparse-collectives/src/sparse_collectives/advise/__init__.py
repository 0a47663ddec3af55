"""`python -m sparse_collectives.advise`: will sparse gradients help my training, on my network?"""
