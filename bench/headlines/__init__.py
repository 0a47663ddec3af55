"""The headline results: claims of papers, ours, and the kernels' marks; functions of records and published figures."""
