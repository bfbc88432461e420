/* What is kept for buckets that travel encoded, from open to close and from round to round. */
#include "sync/encoded.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "comm/hosts/leg.h"

#include <stdint.h>
#include <string.h>

/* The most of any one bucket. */
typedef struct needs {
  size_t values;
  size_t members;
  size_t payload;
  size_t received;
  size_t sum;     /* values of this rank's part */
  size_t of_sum;  /* bytes of their encoding */
  size_t scratch; /* bytes */
} needs;

static void raise_to(size_t *most, size_t value) {
  *most = value > *most ? value : *most;
}

void even_encoded_part(const even_encoded *encoded, size_t count, int rank, size_t *first, size_t *part) {
  size_t block = even_encoding_block(&encoded->encoding);
  size_t blocks = count / block + (count % block != 0);
  size_t ranks = (size_t)encoded->ranks;
  size_t end = blocks * ((size_t)rank + 1) / ranks * block;
  *first = blocks * (size_t)rank / ranks * block;
  *first = *first < count ? *first : count;
  *part = (end < count ? end : count) - *first;
}

static uint64_t mixed(uint64_t seed, uint64_t number) {
  return (seed * 1000003u + number) & INT64_MAX;
}

uint64_t even_encoded_seed(const even_encoded *encoded, size_t bucket, size_t part) {
  uint64_t seed = mixed(encoded->seed, (uint64_t)encoded->rank);
  seed = mixed(mixed(mixed(seed, encoded->step), encoded->round_of_step), bucket);
  return part == 0 ? seed : mixed(seed, part);
}

uint64_t even_encoded_moved(const even_encoded *encoded, const even_encoded_bucket *bucket) {
  uint64_t bytes = 0;
  if (!bucket->in_parts) {
    return even_encoding_bytes(&encoded->encoding, bucket->count) * (uint64_t)encoded->ranks / 2;
  }
  for (int rank = 0; rank < encoded->ranks; rank++) {
    size_t first = 0;
    size_t count = 0;
    even_encoded_part(encoded, bucket->count, rank, &first, &count);
    bytes += even_encoding_bytes(&encoded->encoding, count);
  }
  return bytes;
}

/* ---- open and close ---- */

/* Among those who encode: leaders of hosts are joined by a network, and all of these have messages. */
static bool has_messages(const even_comm *comm) {
  even_hosts_place place;
  return even_hosts_place_of(comm, &place) || even_comm_has_messages(comm);
}

static even_status check(const even_sync_params *params, const even_comm *comm) {
  int encoding = (int)params->encoding;
  int way = (int)params->way;
  if (encoding < EVEN_SYNC_PLAIN || encoding > EVEN_SYNC_TOP || way < EVEN_SYNC_CHEAPER || way > EVEN_SYNC_PARTS) {
    return even_fail(EVEN_ERR_ARGUMENT, "no encoding number %d by way number %d", encoding, way);
  }
  if (encoding == EVEN_SYNC_PLAIN) {
    return EVEN_OK;
  }
  if (params->wire != EVEN_F32) {
    return even_fail(EVEN_ERR_ARGUMENT, "gradients cannot travel encoded and in 16 bits at once");
  }
  if (encoding == EVEN_SYNC_TOP && !(params->ratio > 0.0 && params->ratio <= 1.0)) {
    return even_fail(EVEN_ERR_ARGUMENT, "a part of %g of the gradients cannot travel", params->ratio);
  }
  if (way == EVEN_SYNC_PARTS && !has_messages(comm)) {
    (void)even_fail(EVEN_ERR_UNSUPPORTED,
                    "the group of %d ranks was opened without messages, by which parts of gradients go",
                    even_comm_ranks(comm));
    return even_error_fix("leave the way to the engine, or gather");
  }
  return EVEN_OK;
}

static bool is_encoded(const even_sync_span *span) {
  return span->dtype == EVEN_F32 || span->dtype == EVEN_F16 || span->dtype == EVEN_BF16;
}

static bool goes_in_parts(const even_encoded *encoded, const even_comm *comm, size_t count) {
  if (encoded->way != EVEN_SYNC_CHEAPER) {
    return encoded->way == EVEN_SYNC_PARTS;
  }
  return encoded->ranks >= EVEN_SYNC_PARTS_RANKS && has_messages(comm) &&
         even_encoding_bytes(&encoded->encoding, count) >= EVEN_SYNC_PARTS_BYTES;
}

/* In parts, an encoding of each; and of all that arrives here. */
static void add_up_parts(const even_encoded *encoded, size_t count, size_t own, needs *most) {
  size_t payload = 0;
  for (int rank = 0; rank < encoded->ranks; rank++) {
    size_t first = 0;
    size_t part = 0;
    even_encoded_part(encoded, count, rank, &first, &part);
    payload += even_encoding_bytes(&encoded->encoding, part);
  }
  size_t of_sum = even_encoding_bytes(&encoded->encoding, own);
  raise_to(&most->payload, payload);
  raise_to(&most->received, payload);
  raise_to(&most->received, of_sum * (size_t)encoded->ranks);
  raise_to(&most->of_sum, of_sum);
  raise_to(&most->sum, own);
}

static even_status plan_bucket(even_encoded *encoded, const even_comm *comm, size_t members,
                               even_encoded_bucket *bucket, needs *most) {
  size_t bytes = even_encoding_bytes(&encoded->encoding, bucket->count);
  if (bucket->count > INT32_MAX) {
    (void)even_fail(EVEN_ERR_ARGUMENT,
                    "a bucket of %zu elements, of %zu parameters, cannot travel encoded: 2^31 - 1 are the most",
                    bucket->count, members);
    return even_error_fix(members > 1 ? "give a smaller cap of buckets (bucket_cap_mb)"
                                      : "train this model without compression, or in 16 bits");
  }
  bucket->in_parts = goes_in_parts(encoded, comm, bucket->count);
  bucket->first = encoded->keeps ? encoded->values : 0;
  bucket->sums_first = encoded->keeps ? encoded->sums : 0;
  encoded->values += bucket->count;
  raise_to(&most->values, bucket->count);
  if (!encoded->encodes) {
    return EVEN_OK;
  }
  raise_to(&most->scratch, even_encoding_scratch_bytes(&encoded->encoding, bucket->count));
  if (bucket->in_parts) {
    even_encoded_part(encoded, bucket->count, encoded->rank, &bucket->own_first, &bucket->own_count);
    encoded->sums += bucket->own_count;
    add_up_parts(encoded, bucket->count, bucket->own_count, most);
  } else {
    raise_to(&most->payload, bytes);
    raise_to(&most->received, bytes * (size_t)encoded->ranks);
  }
  return EVEN_OK;
}

static even_status plan(even_encoded *encoded, const even_sync_params *params, const even_sync_layout *layout,
                        const even_comm *comm, needs *most) {
  size_t at = 0;
  for (size_t b = 0; b < layout->bucket_count; b++) {
    const even_sync_span *span = &layout->buckets[b];
    for (size_t i = 0; is_encoded(span) && i < span->members; i++) {
      encoded->buckets[b].count += params->parameters[layout->order[at + i]].count;
    }
    at += span->members;
    raise_to(&most->members, span->members);
    EVEN_TRY(plan_bucket(encoded, comm, span->members, &encoded->buckets[b], most));
  }
  return EVEN_OK;
}

static even_status get_memory(even_encoded *encoded, const needs *most) {
  size_t ranks = (size_t)encoded->ranks;
  for (int turn = 0; turn < 2; turn++) {
    EVEN_TRY(EVEN_NEW_ARRAY(&encoded->left[turn], encoded->keeps ? encoded->values : most->values));
    if (turn == 0 || encoded->keeps) {
      EVEN_TRY(EVEN_NEW_ARRAY(&encoded->left_of_sums[turn], encoded->keeps ? encoded->sums : most->sum));
    }
    EVEN_TRY(EVEN_NEW_ARRAY(&encoded->payload[turn], most->payload));
    EVEN_TRY(EVEN_NEW_ARRAY(&encoded->scratch[turn], most->scratch));
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&encoded->total, most->values));
  EVEN_TRY(EVEN_NEW_ARRAY(&encoded->received, most->received));
  EVEN_TRY(EVEN_NEW_ARRAY(&encoded->of_sum, most->of_sum));
  EVEN_TRY(EVEN_NEW_ARRAY(&encoded->used, most->members));
  EVEN_TRY(EVEN_NEW_ARRAY(&encoded->sends, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&encoded->receives, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&encoded->inputs, ranks));
  return EVEN_NEW_ARRAY(&encoded->outputs, ranks);
}

static even_status set_up(even_encoded *encoded, const even_sync_params *params, const even_sync_layout *layout,
                          const even_comm *comm) {
  needs most = {0};
  encoded->encoding = (even_encoding){.kind = params->encoding, .ratio = params->ratio};
  encoded->way = params->way;
  encoded->seed = params->seed;
  even_hosts_place place = {.hosts = even_comm_ranks(comm), .host = even_comm_rank(comm), .leads = true};
  encoded->by_host = even_hosts_place_of(comm, &place);
  encoded->encodes = place.leads;
  encoded->rank = place.host;
  encoded->ranks = place.hosts;
  encoded->keeps = even_encoding_leaves_out(&encoded->encoding);
  EVEN_TRY(EVEN_NEW_ARRAY(&encoded->buckets, layout->bucket_count));
  EVEN_TRY(plan(encoded, params, layout, comm, &most));
  return get_memory(encoded, &most);
}

even_status even_encoded_open(const even_sync_params *params, const even_sync_layout *layout, const even_comm *comm,
                              even_encoded **out) {
  even_encoded *encoded = NULL;
  *out = NULL;
  EVEN_TRY(check(params, comm));
  if (params->encoding == EVEN_SYNC_PLAIN) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW(&encoded));
  *out = encoded; /* closed with the engine, whatever comes of this */
  return set_up(encoded, params, layout, comm);
}

void even_encoded_close(even_encoded *encoded) {
  if (encoded == NULL) {
    return;
  }
  for (int turn = 0; turn < 2; turn++) {
    even_free(encoded->left[turn]);
    even_free(encoded->left_of_sums[turn]);
    even_free(encoded->payload[turn]);
    even_free(encoded->scratch[turn]);
  }
  even_free(encoded->buckets);
  even_free(encoded->total);
  even_free(encoded->received);
  even_free(encoded->of_sum);
  even_free(encoded->used);
  even_free(encoded->sends);
  even_free(encoded->receives);
  even_free(encoded->inputs);
  even_free(encoded->outputs);
  even_free(encoded);
}

/* ---- from round to round ---- */

void even_encoded_forget(even_encoded *encoded, const even_sync_layout *layout) {
  encoded->has_step = false;
  for (size_t b = 0; b < layout->bucket_count; b++) {
    encoded->buckets[b].turn = 0;
  }
  if (encoded->keeps) {
    memset(encoded->left[0], 0, encoded->values * sizeof(float));
    memset(encoded->left_of_sums[0], 0, encoded->sums * sizeof(float));
  }
}

void even_encoded_begin(even_encoded *encoded, uint32_t step) {
  bool again = encoded->has_step && encoded->step == step;
  encoded->round_of_step = again ? encoded->round_of_step + 1 : 0;
  encoded->step = step;
  encoded->has_step = true;
  encoded->finite = true;
  encoded->counts = true;
}

void even_encoded_end(even_encoded *encoded, const even_sync_layout *layout) {
  for (size_t b = 0; b < layout->bucket_count; b++) {
    even_encoded_bucket *bucket = &encoded->buckets[b];
    if (bucket->went && encoded->finite && encoded->counts) {
      bucket->turn = (uint8_t)(bucket->turn ^ 1u);
    }
    bucket->discarded = bucket->went && encoded->finite && !encoded->counts;
    bucket->went = false;
  }
}

size_t even_encoded_parity(const even_encoded *encoded, const even_encoded_bucket *bucket) {
  return (size_t)(bucket - encoded->buckets) & 1u;
}

float *even_encoded_values(even_encoded *encoded, const even_encoded_bucket *bucket) {
  return encoded->keeps ? encoded->left[bucket->turn ^ 1u] + bucket->first
                        : encoded->left[even_encoded_parity(encoded, bucket)];
}

float *even_encoded_before(even_encoded *encoded, const even_encoded_bucket *bucket) {
  return encoded->keeps ? encoded->left[bucket->turn] + bucket->first : NULL;
}

float *even_encoded_sum(even_encoded *encoded, const even_encoded_bucket *bucket) {
  return encoded->keeps ? encoded->left_of_sums[bucket->turn ^ 1u] + bucket->sums_first : encoded->left_of_sums[0];
}

float *even_encoded_sum_before(even_encoded *encoded, const even_encoded_bucket *bucket) {
  return encoded->keeps ? encoded->left_of_sums[bucket->turn] + bucket->sums_first : NULL;
}
