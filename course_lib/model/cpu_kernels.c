/* The CPU kernels: matrix products with packed weights, paged attention of decodes, and the small
   operations between them, each in one pass over memory. float32 throughout.

   Compiled by cpu_kernels.py on first use, for the processor at hand. Where that can't be, the same
   things are done with PyTorch's operations. Rows are tokens; all matrices are stored row by row. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef float v8 __attribute__((vector_size(32), aligned(4))); /* eight floats */

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

INLINE float sum_of(v8 a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }

/* ---- Matrix product: y [m, n] = x [m, k] Wt (+ add [m, n]) ----

   W [n, k] is packed into panels of 16 of its rows, each panel k x 16: as the inner loop reads it.
   A tile of y, 6 rows x 16 columns, stays in 12 vector registers while k runs. What a tile reads
   comes from near by: DEPTH columns of a panel (18 KB) fit the first-level cache and serve all rows;
   ROWS rows of x (about 96 KB) fit the second-level cache and serve all panels. With few rows the
   weights' way from memory is what counts: the next piece of the panel is prefetched meanwhile.
   (The scheme of GotoBLAS and BLIS: Goto and van de Geijn, 2008; Van Zee and van de Geijn, 2015.) */

#define PANEL 16
#define TILE_ROWS 6
#define DEPTH 288
#define ROWS 84

INLINE void tile(int rows, const float *x, const float *panel, int64_t step, const float *next, const float *add, float *y,
                 int64_t depth, int64_t k, int64_t n)
{
    v8 sum[TILE_ROWS][2];
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (v8){0};
#pragma GCC unroll 4
    for (int64_t d = 0; d < depth; d++) {
        const v8 *w = (const v8 *)(panel + d * step);
        __builtin_prefetch(next + d * PANEL);
        for (int r = 0; r < rows; r++) {
            float value = x[r * k + d];
            sum[r][0] += value * w[0];
            sum[r][1] += value * w[1];
        }
    }
    for (int r = 0; r < rows; r++) {
        v8 *out = (v8 *)(y + r * n);
        const v8 *before = add ? (const v8 *)(add + r * n) : NULL;
        out[0] = before ? before[0] + sum[r][0] : sum[r][0];
        out[1] = before ? before[1] + sum[r][1] : sum[r][1];
    }
}

/* y [rows, 16 columns] (+)= x [rows, depth] times a panel, tile by tile. Rows of x are k apart, those of y and add n,
   those of the panel `step`. */
INLINE void column(int64_t rows, const float *x, const float *panel, int64_t step, const float *next, const float *add, float *y,
                   int64_t depth, int64_t k, int64_t n)
{
    for (int64_t row = 0; row < rows; row += TILE_ROWS) {
        const float *a = x + row * k, *before = add ? add + row * n : NULL;
        float *out = y + row * n;
        switch (MIN(rows - row, TILE_ROWS)) {
        case 1: tile(1, a, panel, step, next, before, out, depth, k, n); break;
        case 2: tile(2, a, panel, step, next, before, out, depth, k, n); break;
        case 3: tile(3, a, panel, step, next, before, out, depth, k, n); break;
        case 4: tile(4, a, panel, step, next, before, out, depth, k, n); break;
        case 5: tile(5, a, panel, step, next, before, out, depth, k, n); break;
        default: tile(6, a, panel, step, next, before, out, depth, k, n);
        }
        next = panel; /* prefetched once is enough */
    }
}

/* n must be a multiple of 16; add may be NULL. */
void matmul(const float *x, const float *packed, const float *add, float *y, int64_t m, int64_t n, int64_t k)
{
#pragma omp parallel
    for (int64_t from = 0; from < m; from += ROWS) {
        int64_t to = MIN(from + ROWS, m);
#pragma omp for schedule(static) nowait
        for (int64_t first = 0; first < n; first += PANEL)
            for (int64_t d = 0; d < k; d += DEPTH) {
                int64_t depth = MIN(DEPTH, k - d);
                const float *panel = packed + first * k + d * PANEL;
                float *out = y + from * n + first;
                const float *before = d ? out : add ? add + from * n + first : NULL;
                column(to - from, x + from * k + d, panel, PANEL, panel + depth * PANEL, before, out, depth, k, n);
            }
    }
}

/* ---- Between the products ---- */

/* out [rows, dim] = x / sqrt(mean of x squared + eps) * weight [dim] */
void rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t dim, float eps)
{
#pragma omp parallel for schedule(static) if (rows > 16)
    for (int64_t r = 0; r < rows; r++) {
        const float *a = x + r * dim;
        float squares = 0;
        for (int64_t d = 0; d < dim; d++) squares += a[d] * a[d];
        float scale = 1 / sqrtf(squares / (float)dim + eps);
        for (int64_t d = 0; d < dim; d++) out[r * dim + d] = a[d] * scale * weight[d];
    }
}

/* out [rows, dim] = silu(gate) * up, where gate_up [rows, 2 dim] holds both side by side */
void silu_mul(const float *gate_up, float *out, int64_t rows, int64_t dim)
{
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = gate_up + r * 2 * dim, *up = gate + dim;
        for (int64_t d = 0; d < dim; d++) out[r * dim + d] = gate[d] / (1 + expf(MIN(-gate[d], 80))) * up[d]; /* e^89 is beyond float32 */
    }
}

/* Rotary embedding, in place: in the first `heads` heads of each row, the pairs (i, i + dim / 2) are turned
   by the angles of the row's position. x: a row every `stride` floats; cosine and sine [rows, dim]. */
void rotate(float *x, const float *cosine, const float *sine, int64_t rows, int64_t heads, int64_t dim, int64_t stride)
{
    const int64_t half = dim / 2;
#pragma omp parallel for schedule(static) if (rows > 16)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            float *first = x + r * stride + h * dim, *second = first + half;
            const float *c = cosine + r * dim, *s = sine + r * dim;
            for (int64_t i = 0; i < half; i++) {
                float a = first[i], b = second[i];
                first[i] = a * c[i] - b * s[i];
                second[i] = b * c[i] + a * s[i];
            }
        }
}

/* Cached K/V: each row's key and value [kv_heads x dim = width] go to the row's slot. Rows lie `stride` floats apart. */
void store_kv(const float *key, const float *value, float *key_cache, float *value_cache, const int64_t *slots,
              int64_t rows, int64_t width, int64_t stride)
{
    for (int64_t r = 0; r < rows; r++) {
        if (slots[r] < 0) continue; /* a row that only fills up a batch */
        memcpy(key_cache + slots[r] * width, key + r * stride, width * sizeof(float));
        memcpy(value_cache + slots[r] * width, value + r * stride, width * sizeof(float));
    }
}

/* ---- A decoder layer but for its attention: in two calls, so that the threads stay awake between the steps ---- */

struct layer {
    int64_t hidden, heads, kv_heads, dim, inner; /* dim of a head; inner of the feed-forward network */
    float eps;
    const float *norm_1, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *norm_2, *gate_up, *down; /* biases and q/k norms: or NULL */
};

/* qkv [rows, heads + 2 kv_heads, dim] of x [rows, hidden]; K and V also go to their slots. normed [rows, hidden]: scratch. */
void before_attention(const struct layer *l, const float *x, const float *cosine, const float *sine, float *normed, float *qkv,
                      float *key_cache, float *value_cache, const int64_t *slots, int64_t rows)
{
    const int64_t q = l->heads * l->dim, kv = l->kv_heads * l->dim, stride = q + 2 * kv;
    rms_norm(x, l->norm_1, normed, rows, l->hidden, l->eps);
    matmul(normed, l->qkv, NULL, qkv, rows, stride, l->hidden);
    for (int64_t r = 0; r < rows; r++) {
        float *row = qkv + r * stride;
        if (l->qkv_bias)
            for (int64_t i = 0; i < stride; i++) row[i] += l->qkv_bias[i];
        if (l->q_norm) {
            rms_norm(row, l->q_norm, row, l->heads, l->dim, l->eps);
            rms_norm(row + q, l->k_norm, row + q, l->kv_heads, l->dim, l->eps);
        }
    }
    rotate(qkv, cosine, sine, rows, l->heads + l->kv_heads, l->dim, stride);
    store_kv(qkv + q, qkv + q + kv, key_cache, value_cache, slots, rows, kv, stride);
}

/* y [rows, hidden] from x and attended [rows, heads, dim]. Scratch: normed [rows, hidden], wide [rows, 3 inner]. */
void after_attention(const struct layer *l, const float *x, const float *attended, float *normed, float *wide, float *y,
                     int64_t rows)
{
    float *gated = wide + rows * 2 * l->inner;
    matmul(attended, l->out, x, y, rows, l->hidden, l->heads * l->dim);
    rms_norm(y, l->norm_2, normed, rows, l->hidden, l->eps);
    matmul(normed, l->gate_up, NULL, wide, rows, 2 * l->inner, l->hidden);
    silu_mul(wide, gated, rows, l->inner);
    matmul(gated, l->down, y, y, rows, l->hidden, l->inner);
}

/* ---- Paged attention of decodes: one query per sequence, K/V read where it lies ----

   The same online softmax as in triton_paged.py: block after block, a running maximum m, a running
   sum z of the weights, and the running output acc, both rescaled when the maximum grows. Nothing is
   gathered first, so a step reads K and V from memory once. Work is shared out by (sequence, K/V head);
   with grouped-query attention the query heads that share a K/V head run together. */

#define MAX_GROUP 16     /* query heads per K/V head */
#define MAX_HEAD_DIM 256 /* a multiple of 16 */
#define MAX_TILE 32      /* positions worked on at a time, within one block */

/* q and out [group, dim]; k and v: this K/V head in slot 0, the next slot `slot` floats further on. */
INLINE void attend_one(
    const float *q, const float *k, const float *v, float *out, const int64_t *block_table, int64_t context_len,
    int64_t block_size, int64_t slot, int group, int dim, float scaling)
{
    const int width = dim / 8;
    v8 acc[MAX_GROUP * MAX_HEAD_DIM / 8];
    float m[MAX_GROUP], z[MAX_GROUP];
    for (int i = 0; i < group * width; i++) acc[i] = (v8){0};
    for (int g = 0; g < group; g++) { m[g] = -1e30f; z[g] = 0; }

    for (int64_t position = 0; position < context_len;) {
        int64_t offset = position % block_size, count = block_size - offset;
        if (count > MAX_TILE) count = MAX_TILE;
        if (count > context_len - position) count = context_len - position;
        int64_t start = (block_table[position / block_size] * block_size + offset) * slot;

        for (int g = 0; g < group; g++) {
            const v8 *query = (const v8 *)(q + g * dim);
            float weight[MAX_TILE], new_m = m[g], sum = 0;
            for (int j = 0; j < count; j++) { /* scores */
                const v8 *key = (const v8 *)(k + start + j * slot);
                v8 even = query[0] * key[0], odd = query[1] * key[1];
                for (int d = 2; d < width; d += 2) { even += query[d] * key[d]; odd += query[d + 1] * key[d + 1]; }
                weight[j] = sum_of(even + odd) * scaling;
            }
            for (int j = 0; j < count; j++) new_m = weight[j] > new_m ? weight[j] : new_m;
            for (int j = 0; j < count; j++) { weight[j] = expf(weight[j] - new_m); sum += weight[j]; }
            float rescale = expf(m[g] - new_m);
            m[g] = new_m;
            z[g] = z[g] * rescale + sum;
            v8 a[MAX_HEAD_DIM / 8];
            for (int d = 0; d < width; d++) a[d] = acc[g * width + d] * rescale;
            for (int j = 0; j < count; j++) {
                const v8 *value = (const v8 *)(v + start + j * slot);
                for (int d = 0; d < width; d++) a[d] += weight[j] * value[d];
            }
            for (int d = 0; d < width; d++) acc[g * width + d] = a[d];
        }
        position += count;
    }
    for (int g = 0; g < group; g++)
        for (int d = 0; d < width; d++) ((v8 *)out)[g * width + d] = acc[g * width + d] / z[g];
}

/* query [rows, heads, dim], a row every `query_stride` floats; out [rows, heads, dim], without gaps;
   rows [sequences]: which row is the query of each sequence; k and v [slots, kv_heads, dim];
   block_tables [sequences, max_blocks]; context_lens [sequences], all > 0. */
void paged_decode(
    const float *query, const float *k, const float *v, float *out, const int64_t *rows, const int64_t *block_tables,
    const int64_t *context_lens, int64_t query_stride, int64_t sequences, int64_t max_blocks, int64_t block_size,
    int64_t heads, int64_t kv_heads, int64_t dim, float scaling)
{
    const int group = (int)(heads / kv_heads);
    const int64_t slot = kv_heads * dim;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t task = 0; task < sequences * kv_heads; task++) {
        int64_t s = task / kv_heads, head = task % kv_heads;
        const float *q = query + rows[s] * query_stride + head * group * dim;
        float *o = out + (rows[s] * heads + head * group) * dim;
        const int64_t *table = block_tables + s * max_blocks, length = context_lens[s];
        const float *key = k + head * dim, *value = v + head * dim;
        if (dim == 64) /* known to the compiler: the inner loops stay in registers */
            attend_one(q, key, value, o, table, length, block_size, slot, group, 64, scaling);
        else if (dim == 128)
            attend_one(q, key, value, o, table, length, block_size, slot, group, 128, scaling);
        else
            attend_one(q, key, value, o, table, length, block_size, slot, group, (int)dim, scaling);
    }
}

/* ---- Paged attention of a chunk: many queries of one sequence ----

   Scores and outputs are products of the same tiles as above. First the keys are gathered through the block
   table into panels of 16 (transposed, so that a panel's row is one number of 16 keys) and the values into rows.
   Then each task takes up to QUERY_ROWS queries (tokens x the heads that share a K/V head) through the keys, KEYS
   at a time, with the online softmax; keys behind the last query are never touched. */

#define QUERY_ROWS 48
#define KEYS 64 /* a multiple of 16 */

typedef int32_t i8 __attribute__((vector_size(32), aligned(4)));

/* e^x of eight numbers, none above 0: 2^n by the exponent's bits, 2^f for the rest (|f| <= 1/2) by its Taylor series,
   which is right to float32's last bit or two. (The library's own function takes twice as long here.) */
INLINE v8 exp_of(v8 x)
{
    const v8 round = {12582912, 12582912, 12582912, 12582912, 12582912, 12582912, 12582912, 12582912}; /* 1.5 x 2^23 */
    x = x * 1.44269504f;
    const v8 least = {-126, -126, -126, -126, -126, -126, -126, -126};
    const i8 is_small = x < least;
    x = (v8)(((i8)least & is_small) | ((i8)x & ~is_small));
    v8 shifted = x + round;
    i8 n = (i8)shifted - (i8)round;
    v8 f = x - __builtin_convertvector(n, v8);
    v8 p = f * 1.33335581e-3f + 9.61812911e-3f;
    p = p * f + 5.55041087e-2f;
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147181e-1f;
    p = p * f + 1.0f;
    return (v8)((i8)p + (n << 23));
}

INLINE void attend_rows(const float *q, const float *keys, const float *values, float *acc, int64_t rows, int64_t group,
                        int64_t first_position, int64_t dim)
{
    float score[QUERY_ROWS * KEYS], m[QUERY_ROWS], z[QUERY_ROWS];
    for (int64_t r = 0; r < rows; r++) { m[r] = -1e30f; z[r] = 0; }
    for (int64_t i = 0; i < rows * dim; i++) acc[i] = 0;
    const int64_t visible = first_position + (rows - 1) / group + 1; /* keys that the last query may look at */
    for (int64_t start = 0; start < visible; start += KEYS) {
        for (int64_t j = 0; j < KEYS && start + j < visible; j += PANEL)
            column(rows, q, keys + (start + j) * dim, PANEL, keys, NULL, score + j, dim, dim, KEYS);
        const int64_t count = MIN(KEYS, visible - start);
        for (int64_t r = 0; r < rows; r++) {
            float *s = score + r * KEYS, new_m = m[r], sum = 0;
            const int64_t may = MIN(count, first_position + r / group + 1 - start); /* of these keys, may be looked at */
            for (int64_t j = 0; j < may; j++) new_m = s[j] > new_m ? s[j] : new_m;
            for (int64_t j = may > 0 ? may : 0; j < KEYS; j++) s[j] = -1e30f; /* no weight */
            v8 sums = (v8){0};
            for (int64_t j = 0; j < KEYS; j += 8) {
                v8 weights = exp_of(*(v8 *)(s + j) - new_m);
                *(v8 *)(s + j) = weights;
                sums += weights;
            }
            sum = sum_of(sums);
            if (new_m > m[r]) {
                float rescale = expf(m[r] - new_m);
                m[r] = new_m;
                z[r] *= rescale;
                for (int64_t d = 0; d < dim; d++) acc[r * dim + d] *= rescale;
            }
            z[r] += sum;
        }
        for (int64_t d = 0; d < dim; d += PANEL)
            column(rows, score, values + start * dim + d, dim, values, acc + d, acc + d, count, KEYS, dim);
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < dim; d++) acc[r * dim + d] /= z[r];
}

/* query and out [queries, heads, dim]: the chunk's rows, those of query `query_stride` floats apart; k and v as above;
   block_table of the sequence; context_len: its tokens up to the chunk's last. Scratch: 2 x kv_heads x (context_len rounded
   up to 16) x dim floats. */
void paged_chunk(const float *query, const float *k, const float *v, float *out, const int64_t *block_table, float *scratch,
                 int64_t query_stride, int64_t queries, int64_t context_len, int64_t block_size, int64_t heads,
                 int64_t kv_heads, int64_t dim, float scaling)
{
    const int64_t group = heads / kv_heads, slot = kv_heads * dim, tokens = QUERY_ROWS / group;
    const int64_t panels = (context_len + PANEL - 1) / PANEL, head_size = panels * PANEL * dim;
    const int64_t blocks = (queries + tokens - 1) / tokens;
    float *keys = scratch, *values = scratch + kv_heads * head_size;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < panels * kv_heads; task++) {
            int64_t head = task % kv_heads, first = task / kv_heads * PANEL, at = head * head_size + first * dim;
            for (int64_t j = 0; j < PANEL; j++) {
                int64_t position = MIN(first + j, context_len - 1); /* a short last panel repeats its last key */
                int64_t row = (block_table[position / block_size] * block_size + position % block_size) * slot + head * dim;
                for (int64_t d = 0; d < dim; d++) keys[at + d * PANEL + j] = k[row + d];
                memcpy(values + at + j * dim, v + row, dim * sizeof(float));
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < blocks * kv_heads; task++) {
            int64_t head = task % kv_heads, token = (blocks - 1 - task / kv_heads) * tokens; /* the longest first */
            int64_t count = MIN(tokens, queries - token), first_position = context_len - queries + token;
            float q[QUERY_ROWS * MAX_HEAD_DIM], acc[QUERY_ROWS * MAX_HEAD_DIM];
            for (int64_t i = 0; i < count; i++)
                for (int64_t d = 0; d < group * dim; d++)
                    q[i * group * dim + d] = query[(token + i) * query_stride + head * group * dim + d] * scaling;
            const float *own_keys = keys + head * head_size, *own_values = values + head * head_size;
            if (dim == 64)
                attend_rows(q, own_keys, own_values, acc, count * group, group, first_position, 64);
            else
                attend_rows(q, own_keys, own_values, acc, count * group, group, first_position, dim);
            for (int64_t i = 0; i < count; i++)
                memcpy(out + ((token + i) * heads + head * group) * dim, acc + i * group * dim, group * dim * sizeof(float));
        }
    }
}
