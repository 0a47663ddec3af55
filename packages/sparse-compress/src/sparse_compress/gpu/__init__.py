"""Exact top-k and error feedback on a GPU, in Triton.

A step knows every size beforehand, so it never waits for the device and can be captured in a CUDA graph:

1. ``accumulate``: v ← v + g, and the largest magnitude of every line of 32 elements.
2. Radix select among the lines' maxima. At least k elements reach the k-th largest maximum, which makes it (cut to
   16 bits) a lower bound of the k-th largest element: lines below it are not read again.
3. Radix select among the elements of the other lines: the exact k-th largest magnitude.
4. Count what is selected in each block, add up the counts, write every block's entries into their own range of the
   result in index order, and clear them in v.

Bytes of a step of n elements with a float32 gradient: the floor is 12n, to read g and v and write v once. Maxima
take n/8 to write and 8 · n/8 to read; six passes read the lines that reach the bound, 128 bytes each. With
independent normal elements that makes 13.9n at density 0.1 % (1.2 times the floor) and 20.1n at 1 % (1.7 times);
with 16-bit gradients, whose floor is 10n, 1.2 and 1.8 times; and 37n where every line has to be read, as when all
elements tie.

Results are the same bits from run to run. Integer additions are the only atomics, and their order does not matter;
every other word is written by exactly one program, and read by programs of later launches only.
"""
