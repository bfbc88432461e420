/* The model of rounds whose gradients travel encoded. */
#include "sync/encoded_model.h"

#include "comm/kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const even_sync_parameter model_parameters[MODEL_PARAMETERS] = {
    {1000, EVEN_F32, 0}, {3, EVEN_F64, 0},   {7001, EVEN_F32, 0}, {1, EVEN_F32, 0},
    {129, EVEN_BF16, 0}, {300, EVEN_F32, 0}, {0, EVEN_F32, 0}};

even_sync_params model_params(even_sync_encoding encoding, even_sync_way way) {
  return (even_sync_params){.size = sizeof(even_sync_params),
                            .parameters = model_parameters,
                            .parameter_count = MODEL_PARAMETERS,
                            .bucket_bytes = 8192,
                            .first_bucket_bytes = 1024,
                            .encoding = encoding,
                            .way = way,
                            .ratio = 0.07,
                            .seed = 99};
}

static float *some(size_t count) {
  return calloc(count + 1, sizeof(float));
}

static int host(const model *m, int rank) {
  return m->host_of == NULL ? rank : m->host_of[rank];
}

int model_encoder(const model *m, int rank) {
  for (int before = 0; before < rank; before++) {
    if (host(m, before) == host(m, rank)) {
      return -1;
    }
  }
  return host(m, rank);
}

bool model_open(model *m, const even_sync_params *params, int ranks, const int *host_of) {
  size_t values = 0;
  *m = (model){.params = *params,
               .encoding = {.kind = params->encoding, .ratio = params->ratio},
               .ranks = ranks,
               .host_of = host_of};
  for (int rank = 0; rank < ranks; rank++) {
    m->encoders += model_encoder(m, rank) >= 0;
  }
  for (size_t p = 0; p < MODEL_PARAMETERS; p++) {
    values += model_parameters[p].count;
  }
  bool all = even_sync_layout_make(params, &m->layout) == EVEN_OK;
  for (int rank = 0; rank < ranks; rank++) {
    m->left[rank] = some(values);
    all = all && m->left[rank] != NULL;
  }
  m->left_of_sums = some(values);
  m->sums = some(values);
  return all && m->left_of_sums != NULL && m->sums != NULL;
}

void model_close(model *m) {
  even_sync_layout_free(&m->layout);
  for (int rank = 0; rank < m->ranks; rank++) {
    free(m->left[rank]);
  }
  free(m->left_of_sums);
  free(m->sums);
}

double model_weight(int rank, int ranks, int round) {
  int total = 0;
  for (int r = 0; r < ranks; r++) {
    total += (r + round) % ranks;
  }
  return ranks == 1 ? 1 : (double)((rank + round) % ranks) / total;
}

/* The second has none on rank 1 in odd rounds, the sixth on no rank in two of three. */
bool model_has(int rank, int round, size_t parameter) {
  return !(parameter == 2 && rank == 1 && round % 2 == 1) && !(parameter == 5 && round % 3 != 0);
}

uint32_t model_step(int round) {
  return (uint32_t)round / 2;
}

static float element(int rank, int round, size_t p, size_t i) {
  double x = (double)(rank + 1) * 0.377 + (double)round * 0.11 + (double)p * 0.7 + (double)(i % 1013) * 0.0917;
  return (float)sin(x * x) * (i % 7 == 0 ? 1e-3f : 3.0f);
}

void model_gradient(int rank, int round, size_t parameter, void *out) {
  for (size_t i = 0; i < model_parameters[parameter].count; i++) {
    float value = element(rank, round, parameter, i);
    uint16_t narrow = 0;
    if (round == MODEL_BAD_ROUND && rank == 0 && parameter == 0 && i == 17) {
      value = INFINITY;
    }
    switch ((int)model_parameters[parameter].dtype) {
      case EVEN_F64:
        ((double *)out)[i] = (double)value;
        break;
      case EVEN_BF16:
        even_kernels_best()->narrow[EVEN_BF16](&narrow, &value, 1, 1.0f);
        ((uint16_t *)out)[i] = narrow;
        break;
      default:
        ((float *)out)[i] = value;
    }
  }
}

static size_t bucket_first(const model *m, size_t bucket) {
  size_t at = 0;
  size_t values = 0;
  for (size_t b = 0; b < bucket; b++) {
    for (size_t i = 0; i < m->layout.buckets[b].members; i++) {
      values += model_parameters[m->layout.order[at++]].count;
    }
  }
  return values;
}

/* The first member of a bucket in layout.order. */
static size_t member_first(const model *m, size_t bucket) {
  size_t at = 0;
  for (size_t b = 0; b < bucket; b++) {
    at += m->layout.buckets[b].members;
  }
  return at;
}

size_t model_first(const model *m, size_t parameter) {
  size_t bucket = m->layout.places[parameter].bucket;
  size_t values = bucket_first(m, bucket);
  for (size_t at = member_first(m, bucket); m->layout.order[at] != parameter; at++) {
    values += model_parameters[m->layout.order[at]].count;
  }
  return values;
}

void model_part(const model *m, size_t bucket, int encoder, size_t *first, size_t *count) {
  size_t begin = bucket_first(m, bucket);
  size_t values = bucket_first(m, bucket + 1) - begin;
  size_t block = m->encoding.kind == EVEN_SYNC_INT8 ? 256 : m->encoding.kind == EVEN_SYNC_ONE_BIT ? 1024 : 1;
  size_t blocks = (values + block - 1) / block;
  size_t from = blocks * (size_t)encoder / (size_t)m->encoders * block;
  size_t until = blocks * ((size_t)encoder + 1) / (size_t)m->encoders * block;
  from = from < values ? from : values;
  until = until < values ? until : values;
  *first = begin + from;
  *count = until - from;
}

/* What arrives of so many values. */
static void sent(const model *m, const float *values, size_t count, uint64_t seed, float *out) {
  void *payload = calloc(even_encoding_bytes(&m->encoding, count) + 4, 1);
  void *scratch = calloc(even_encoding_scratch_bytes(&m->encoding, count) + 4, 1);
  memset(out, 0, count * sizeof *out);
  if (payload == NULL || scratch == NULL) {
    abort();
  }
  even_encoding_encode(&m->encoding, values, count, seed, payload, scratch);
  if (even_encoding_add(&m->encoding, payload, out, count, 1.0f) != EVEN_OK) {
    abort();
  }
  free(payload);
  free(scratch);
}

static uint64_t seed_of(const model *m, int encoder, int round, size_t bucket, size_t part) {
  const uint64_t numbers[] = {(uint64_t)encoder, model_step(round), (uint64_t)(round % 2), bucket, part};
  uint64_t seed = m->params.seed;
  for (size_t i = 0; i < (part == 0 ? 4 : 5); i++) {
    seed = (seed * 1000003u + numbers[i]) & (UINT64_MAX >> 1);
  }
  return seed;
}

/* Of the values of one bucket, those of parameters that no rank has. */
static void unused(const model *m, size_t bucket, bool *out) {
  size_t member = member_first(m, bucket);
  size_t at = 0;
  for (size_t i = 0; i < m->layout.buckets[bucket].members; i++) {
    size_t p = m->layout.order[member + i];
    for (size_t k = 0; k < model_parameters[p].count; k++) {
      out[at++] = m->used[p] == 0;
    }
  }
}

static void put_together(const model *m, size_t bucket, int rank, int round, const bool *without, float *out) {
  size_t member = member_first(m, bucket);
  const float *left = m->left[rank] + bucket_first(m, bucket);
  size_t at = 0;
  for (size_t i = 0; i < m->layout.buckets[bucket].members; i++) {
    size_t p = m->layout.order[member + i];
    size_t count = model_parameters[p].count;
    float weight = model_has(rank, round, p) ? (float)model_weight(rank, m->ranks, round) : 0.0f;
    void *gradient = some(2 * count);
    model_gradient(rank, round, p, gradient);
    even_encoding_weigh(out + at, gradient, model_parameters[p].dtype, count, weight);
    free(gradient);
    for (size_t k = at; k < at + count; k++) {
      out[k] = without[k] ? 0.0f : out[k] + left[k];
    }
    at += count;
  }
}

/* What is left of `values` when `arrived` has been sent; what nobody has waits. */
static void leave(const float *values, const float *arrived, const bool *without, size_t count, float *left) {
  for (size_t i = 0; i < count; i++) {
    left[i] = without[i] ? left[i] : values[i] - arrived[i];
  }
}

static void gather(const model *m, size_t bucket, int encoder, int round, const float *values, float *arrived) {
  size_t count = bucket_first(m, bucket + 1) - bucket_first(m, bucket);
  sent(m, values, count, seed_of(m, encoder, round, bucket, 0), arrived);
}

static void send_parts(const model *m, size_t bucket, int encoder, int round, const float *values, float *arrived) {
  size_t begin = bucket_first(m, bucket);
  for (int owner = 0; owner < m->encoders; owner++) {
    size_t first = 0;
    size_t count = 0;
    model_part(m, bucket, owner, &first, &count);
    sent(m, values + (first - begin), count, seed_of(m, encoder, round, bucket, (size_t)owner + 1),
         arrived + (first - begin));
  }
}

/* The sum goes encoded, too. */
static void encode_sums(const model *m, size_t bucket, int round, const bool *without, float *sums, float *left) {
  size_t begin = bucket_first(m, bucket);
  for (int owner = 0; owner < m->encoders; owner++) {
    size_t first = 0;
    size_t count = 0;
    model_part(m, bucket, owner, &first, &count);
    size_t from = first - begin;
    float *values = some(count);
    for (size_t i = 0; i < count; i++) {
      values[i] = without[from + i] ? 0.0f : sums[from + i] + left[from + i];
    }
    sent(m, values, count, seed_of(m, owner, round, bucket, (size_t)m->encoders + 1), sums + from);
    leave(values, sums + from, without + from, count, left + from);
    free(values);
  }
}

/* What the ranks of a host have together; of those that do not encode nothing is left. The rank that encodes it. */
static int put_host_together(const model *m, size_t bucket, int encoder, int round, const bool *without, float *values,
                             float *const *left) {
  size_t begin = bucket_first(m, bucket);
  size_t count = bucket_first(m, bucket + 1) - begin;
  float *own = some(count);
  int leader = -1;
  for (int rank = 0; rank < m->ranks; rank++) {
    if (host(m, rank) != encoder) {
      continue;
    }
    put_together(m, bucket, rank, round, without, own);
    for (size_t i = 0; i < count; i++) {
      values[i] = leader < 0 ? own[i] : values[i] + own[i];
      left[rank][begin + i] = leader < 0 || without[i] ? left[rank][begin + i] : 0.0f;
    }
    leader = leader < 0 ? rank : leader;
  }
  free(own);
  return leader;
}

static void reduce(model *m, size_t bucket, int round, float *const *left, float *left_of_sums) {
  size_t begin = bucket_first(m, bucket);
  size_t count = bucket_first(m, bucket + 1) - begin;
  float *values = some(count);
  float *arrived = some(count);
  bool *without = calloc(count + 1, sizeof *without);
  float *sums = m->sums + begin;
  bool parts = m->params.way == EVEN_SYNC_PARTS;
  unused(m, bucket, without);
  memset(sums, 0, count * sizeof *sums);
  for (int encoder = 0; encoder < m->encoders; encoder++) {
    int rank = put_host_together(m, bucket, encoder, round, without, values, left);
    (parts ? send_parts : gather)(m, bucket, encoder, round, values, arrived);
    for (size_t i = 0; i < count; i++) {
      sums[i] += arrived[i];
    }
    leave(values, arrived, without, count, left[rank] + begin);
  }
  if (parts) {
    encode_sums(m, bucket, round, without, sums, left_of_sums + begin);
  }
  m->finite = m->finite && even_encoding_finite(sums, EVEN_F32, count);
  free(values);
  free(arrived);
  free(without);
}

static void learn_used(model *m, int round) {
  memset(m->used, 0, sizeof m->used);
  for (size_t p = 0; p < MODEL_PARAMETERS; p++) {
    for (int rank = 0; rank < m->ranks; rank++) {
      m->used[p] = m->used[p] != 0 || model_has(rank, round, p);
    }
  }
}

static bool travels_encoded(const model *m, size_t bucket) {
  size_t member = member_first(m, bucket);
  bool any = false;
  for (size_t i = 0; i < m->layout.buckets[bucket].members; i++) {
    any = any || m->used[m->layout.order[member + i]] != 0;
  }
  return any && m->layout.buckets[bucket].dtype != EVEN_F64;
}

void model_round(model *m, int round) {
  size_t values = bucket_first(m, m->layout.bucket_count);
  float *left[MODEL_RANKS] = {NULL};
  float *left_of_sums = some(values);
  m->finite = true;
  learn_used(m, round);
  memcpy(left_of_sums, m->left_of_sums, values * sizeof *left_of_sums);
  for (int rank = 0; rank < m->ranks; rank++) {
    left[rank] = some(values);
    memcpy(left[rank], m->left[rank], values * sizeof(float));
  }
  for (size_t b = 0; b < m->layout.bucket_count; b++) {
    if (travels_encoded(m, b)) {
      reduce(m, b, round, left, left_of_sums);
    }
  }
  bool keeps = m->encoding.kind != EVEN_SYNC_INT8 && m->finite;
  memcpy(m->left_of_sums, keeps ? left_of_sums : m->left_of_sums, keeps ? values * sizeof(float) : 0);
  for (int rank = 0; rank < m->ranks; rank++) {
    memcpy(m->left[rank], keeps ? left[rank] : m->left[rank], keeps ? values * sizeof(float) : 0);
    free(left[rank]);
  }
  free(left_of_sums);
}
