"""What an exchange will take: traffic, measured costs, and the choice of the fastest."""
