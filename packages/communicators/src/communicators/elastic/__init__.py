"""Elastic groups of ranks: a death costs a step, newcomers join between two, and no two groups go on side by side."""
