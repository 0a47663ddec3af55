"""Exact top-k and error feedback on a GPU, in Triton.

A step knows every size beforehand, so it never waits for the device and can be captured in a CUDA graph:

1. ``accumulate``: v ← v + g, and the largest magnitude of every line of 16 elements.
2. Radix select among the lines' maxima. At least k elements reach the k-th largest maximum, which makes it (cut to
   16 bits) a lower bound of the k-th largest element: lines below it are not read again. The others are listed, in
   order, so that a block of the list is full of them however rare they are.
3. Radix select among the elements of the listed lines: the exact k-th largest magnitude.
4. Count the selected elements in each block of the list, add up the counts, write every block's entries into their own
   range of the result in index order, and clear them in v.

Bytes of a step of n elements with a float32 gradient: the floor is 12n, to read g and v and write v once. Maxima
take n/4 to write and four times n/4 to read; six passes read the lines that reach the bound, 64 bytes each, and their
numbers. With independent normal elements that makes 13.7n at density 0.1 % (1.1 times the floor) and 17.4n at 1 % (1.5
times); with 16-bit gradients, whose floor is 10n, 1.2 and 1.5 times; and 39n where every line has to be read, as when
all elements tie. Measured on an H100 at n = 10⁹, 1.3 and 2.2 times the floor: the rest is the histograms' arithmetic.
Lines of 8 elements make it 1.5 and 2.0, of 32 1.3 and 3.2.

Results are the same bits from run to run. Integer additions are the only atomics, and their order does not matter;
every other word is written by exactly one program, and read by programs of later launches only.
"""
