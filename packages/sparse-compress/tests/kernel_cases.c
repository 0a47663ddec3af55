/* Runs cases of the kernels where no Python is: bench/compilers.py writes them to stdin, and compares what comes out.
 *
 * A case: which kernel, at which level at most, three numbers, bytes that go in, bytes that come out; then the bytes.
 * Answered by the level that ran, what the kernel returned, and the bytes. */
#include KERNELS

#include <stdio.h>
#include <stdlib.h>

enum { SELECT, STEP, MERGE, WITHOUT, PUT, PACK, UNPACK, VALUES };

/* in, out: of the tensors one after the other. n: elements; k: entries that are asked for; m: of the other vector. */
static int64_t run(int64_t kernel, int64_t n, int64_t k, int64_t m, char *in, char *out, char *scratch) {
    int64_t all, highs = INT32_MAX;
    switch (kernel) {
    case SELECT:
        return sc_select(in, n, k, -1, 0, out, out + 4 * k, scratch);
    case STEP: /* v, u and g; in place */
        memcpy(out + 8 * k, in, (size_t)n * 8);
        return sc_step(out + 8 * k, out + 8 * k + 4 * n, in + 8 * n, FLOAT32, 0.9f, out + 8 * k, out + 8 * k + 4 * n, n, k,
                       -1, 0, out, out + 4 * k, scratch);
    case MERGE: /* two vectors of n and m entries */
        all = sc_union(in, in + 4 * n, n, in + 8 * n, in + 8 * n + 4 * m, m, scratch);
        sc_split(scratch, &highs, &k, 1, out, out + 4 * k, out + 8 * k, out + 4 * k + 4 * all);
        return all;
    case WITHOUT:
        all = sc_without(in, in + 4 * n, n, in + 8 * n, m, scratch);
        sc_join(scratch, out, out + 4 * all);
        return all;
    case PUT: /* k entries */
        sc_put(out, n, in, in + 4 * k, k, 3);
        return 0;
    case PACK: /* n indices; k and m: lower bits of each, and bits of the rest */
        sc_pack_indices(in, n, (int)k, m, out);
        return 0;
    case UNPACK:
        return sc_unpack_indices(in, n, (int)k, m, out);
    case VALUES: /* in two bytes, and back, and what is left over; in one */
        sc_to_bf16(in, n, out);
        sc_of_bf16(out, n, out + 2 * n);
        sc_leftover(in, out + 2 * n, n, out + 6 * n);
        all = sc_to_int8(in, n, out + 10 * n);
        sc_of_int8(out + 10 * n, n, (int)all, out + 11 * n);
        return all;
    default:
        return -1;
    }
}

int main(void) {
    int64_t said[7], answer[2]; /* kernel, level, n, k, m, bytes in, bytes out */
    while (fread(said, sizeof said, 1, stdin) == 1) {
        size_t given = (size_t)said[5], made = (size_t)said[6];
        char *in = malloc(given + 1), *out = calloc(made + 1, 1);
        char *scratch = malloc((size_t)(sc_scratch(said[2], said[3]) + 16 * (said[2] + said[4]) + PIECES));
        if (!in || !out || !scratch || fread(in, 1, given, stdin) != given)
            return 1;
        answer[0] = sc_use((int)said[1]);
        answer[1] = run(said[0], said[2], said[3], said[4], in, out, scratch);
        fwrite(answer, sizeof answer, 1, stdout);
        fwrite(out, 1, made, stdout);
        free(in), free(out), free(scratch);
    }
    return 0;
}
