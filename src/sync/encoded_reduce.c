/* One bucket's encodings on their way: gathered by every rank, or by each its part, whose sum is encoded again. Over
 * several hosts these ranks are the hosts' leaders, who encode what the ranks of their hosts have together. */
#include "base/fail.h"
#include "comm/hosts/leg.h"
#include "comm/kernels.h"
#include "sync/engine.h"

#include <string.h>

/* A bucket under way. */
typedef struct passage {
  even_sync *sync;
  even_encoded *encoded;
  even_encoded_bucket *bucket;
  const even_sync_span *span;
  const size_t *members;
  size_t number;
  even_comm *comm; /* of those who encode; NULL: this rank does not */
  float *values;
  unsigned char *payload; /* this rank's encodings */
  unsigned char *scratch;
  float *total; /* the sum, one parameter after the other */
} passage;

static passage passage_of(even_sync *sync, size_t number) {
  even_encoded *encoded = sync->encoded;
  even_encoded_bucket *bucket = &encoded->buckets[number];
  const even_sync_span *span = &sync->layout.buckets[number];
  size_t parity = even_encoded_parity(encoded, bucket);
  bool whole = span->dtype == EVEN_F32 && span->bytes == bucket->count * sizeof(float); /* no gaps between slots */
  return (passage){.sync = sync,
                   .encoded = encoded,
                   .bucket = bucket,
                   .span = span,
                   .members = sync->layout.order + sync->first[number],
                   .number = number,
                   .comm = encoded->by_host ? NULL : sync->comm,
                   .values = even_encoded_values(encoded, bucket),
                   .payload = encoded->payload[parity],
                   .scratch = encoded->scratch[parity],
                   .total = whole ? (float *)(void *)(sync->base + span->offset) : encoded->total};
}

/* Whether some rank has a gradient of any member. What is sent for one that nobody has arrives nowhere, so it has to be
 * known before: by a call of as many bytes as the bucket has parameters. */
static even_status learn_used(const passage *one, bool *any) {
  uint8_t *used = one->encoded->used;
  *any = false;
  for (size_t i = 0; i < one->span->members; i++) {
    used[i] = atomic_load(&one->sync->ready[one->members[i]]);
  }
  EVEN_TRY(even_comm_all_reduce(one->sync->comm, used, one->span->members, EVEN_U8, EVEN_MAX));
  for (size_t i = 0; i < one->span->members; i++) {
    *any = *any || used[i] != 0;
  }
  return EVEN_OK;
}

/* Of the members that nobody has, what lies in [first, first + count) of the bucket's values: `to` holds these from
 * `first` on, and becomes `before`, or zeros without it. */
static void replace_unused(const passage *one, float *to, const float *before, size_t first, size_t count) {
  size_t at = 0;
  for (size_t i = 0; i < one->span->members; i++) {
    size_t end = at + one->sync->parameters[one->members[i]].count;
    size_t from = at > first ? at : first;
    size_t until = end < first + count ? end : first + count;
    if (one->encoded->used[i] == 0 && from < until) {
      size_t bytes = (until - from) * sizeof *to;
      if (before == NULL) {
        memset(to + (from - first), 0, bytes);
      } else {
        memcpy(to + (from - first), before + (from - first), bytes);
      }
    }
    at = end;
  }
}

static void put_together(const passage *one) {
  even_sync *sync = one->sync;
  const float *before = even_encoded_before(one->encoded, one->bucket);
  float *to = one->values;
  for (size_t i = 0; i < one->span->members; i++) {
    size_t index = one->members[i];
    size_t count = sync->parameters[index].count;
    bool has = atomic_load(&sync->ready[index]) != 0;
    even_encoding_weigh(to, has ? sync->gradients[index] : NULL, one->span->dtype, count,
                        has ? (float)sync->weight : 0.0f);
    even_sync_saw(sync, index, even_encoding_finite(to, EVEN_F32, count));
    to += count;
  }
  if (before != NULL) {
    even_encoding_add_values(one->values, before, one->bucket->count);
  }
}

static void put_back(const passage *one) {
  const even_sync *sync = one->sync;
  const float *from = one->total;
  bool in_place = (const unsigned char *)from == sync->base + one->span->offset;
  for (size_t i = 0; i < one->span->members && !in_place; i++) {
    size_t index = one->members[i];
    size_t count = sync->parameters[index].count;
    void *slot = sync->base + sync->layout.places[index].offset;
    if (one->span->dtype == EVEN_F32) {
      memcpy(slot, from, count * sizeof *from);
    } else {
      even_kernels_best()->narrow[one->span->dtype](slot, from, count, 1.0f);
    }
    from += count;
  }
}

/* ---- gathered ---- */

static even_status gather(const passage *one) {
  even_encoded *encoded = one->encoded;
  const even_encoding *encoding = &encoded->encoding;
  size_t count = one->bucket->count;
  size_t bytes = even_encoding_bytes(encoding, count);
  for (int rank = 0; rank < encoded->ranks; rank++) {
    encoded->receives[rank] = bytes;
  }
  EVEN_TRY(even_comm_all_gather(one->comm, one->payload, encoded->received, encoded->receives, EVEN_U8));
  memset(one->total, 0, count * sizeof *one->total);
  for (int rank = 0; rank < encoded->ranks; rank++) {
    EVEN_TRY(even_encoding_add(encoding, encoded->received + (size_t)rank * bytes, one->total, count, 1.0f));
  }
  return encoded->keeps ? even_encoding_add(encoding, one->payload, one->values, count, -1.0f) : EVEN_OK;
}

/* ---- in parts ---- */

/* Each rank's part of this rank's values, encoded: one after the other. */
static void encode_parts(const passage *one) {
  const even_encoded *encoded = one->encoded;
  unsigned char *at = one->payload;
  for (int rank = 0; rank < encoded->ranks; rank++) {
    size_t first = 0;
    size_t count = 0;
    even_encoded_part(encoded, one->bucket->count, rank, &first, &count);
    even_encoding_encode(&encoded->encoding, one->values + first, count,
                         even_encoded_seed(encoded, one->number, (size_t)rank + 1), at, one->scratch);
    at += even_encoding_bytes(&encoded->encoding, count);
  }
}

/* into += factor * what lies at `at`: an encoding of each part, one after the other. */
static even_status add_parts(const passage *one, const unsigned char *at, float *into, float factor) {
  const even_encoded *encoded = one->encoded;
  for (int rank = 0; rank < encoded->ranks; rank++) {
    size_t first = 0;
    size_t count = 0;
    even_encoded_part(encoded, one->bucket->count, rank, &first, &count);
    EVEN_TRY(even_encoding_add(&encoded->encoding, at, into + first, count, factor));
    at += even_encoding_bytes(&encoded->encoding, count);
  }
  return EVEN_OK;
}

static even_status exchange_parts(const passage *one) {
  even_encoded *encoded = one->encoded;
  unsigned char *at = one->payload;
  size_t bytes = even_encoding_bytes(&encoded->encoding, one->bucket->own_count);
  for (int rank = 0; rank < encoded->ranks; rank++) {
    size_t first = 0;
    size_t count = 0;
    even_encoded_part(encoded, one->bucket->count, rank, &first, &count);
    encoded->inputs[rank] = at;
    encoded->sends[rank] = even_encoding_bytes(&encoded->encoding, count);
    at += encoded->sends[rank];
    encoded->outputs[rank] = encoded->received + (size_t)rank * bytes;
    encoded->receives[rank] = bytes;
  }
  return even_comm_all_to_all(one->comm, encoded->inputs, encoded->sends, encoded->outputs, encoded->receives);
}

/* The sum of this rank's part, and what was left out of it before, encoded for all. */
static even_status encode_sum(const passage *one) {
  even_encoded *encoded = one->encoded;
  const even_encoding *encoding = &encoded->encoding;
  const even_encoded_bucket *bucket = one->bucket;
  const float *before = even_encoded_sum_before(encoded, bucket);
  float *sum = even_encoded_sum(encoded, bucket);
  memset(sum, 0, bucket->own_count * sizeof *sum);
  for (int rank = 0; rank < encoded->ranks; rank++) {
    EVEN_TRY(even_encoding_add(encoding, encoded->outputs[rank], sum, bucket->own_count, 1.0f));
  }
  if (before != NULL) {
    even_encoding_add_values(sum, before, bucket->own_count);
    replace_unused(one, sum, NULL, bucket->own_first, bucket->own_count);
  }
  even_encoding_encode(encoding, sum, bucket->own_count,
                       even_encoded_seed(encoded, one->number, (size_t)encoded->ranks + 1), encoded->of_sum,
                       one->scratch);
  if (before == NULL) {
    return EVEN_OK;
  }
  EVEN_TRY(even_encoding_add(encoding, encoded->of_sum, sum, bucket->own_count, -1.0f));
  replace_unused(one, sum, before, bucket->own_first, bucket->own_count);
  return EVEN_OK;
}

static even_status by_parts(const passage *one) {
  even_encoded *encoded = one->encoded;
  EVEN_TRY(exchange_parts(one));
  EVEN_TRY(encode_sum(one));
  EVEN_TRY(even_comm_all_gather(one->comm, encoded->of_sum, encoded->received, encoded->sends, EVEN_U8));
  memset(one->total, 0, one->bucket->count * sizeof *one->total);
  EVEN_TRY(add_parts(one, encoded->received, one->total, 1.0f));
  return encoded->keeps ? add_parts(one, one->payload, one->values, -1.0f) : EVEN_OK;
}

/* ---- among those who encode ---- */

static void encode(const passage *one) {
  const even_encoded *encoded = one->encoded;
  if (one->bucket->in_parts) {
    encode_parts(one);
  } else {
    even_encoding_encode(&encoded->encoding, one->values, one->bucket->count,
                         even_encoded_seed(encoded, one->number, 0), one->payload, one->scratch);
  }
}

static even_status exchange(const passage *one) {
  return one->bucket->in_parts ? by_parts(one) : gather(one);
}

static even_status leg(even_comm *leaders, void *context) {
  passage *one = context;
  one->comm = leaders;
  encode(one);
  return exchange(one);
}

/* A rank that leads no host has given away all that it had, and leaves nothing out. */
static even_status by_host(passage *one) {
  size_t count = one->bucket->count;
  EVEN_TRY(even_hosts_reduce_by_leg(one->sync->comm, one->values, one->total, count, leg, one));
  if (one->comm == NULL) {
    memset(one->values, 0, count * sizeof *one->values);
  }
  return EVEN_OK;
}

void even_sync_encode_ahead(even_sync *sync, size_t bucket) {
  passage one = passage_of(sync, bucket);
  put_together(&one);
  if (!one.encoded->by_host) {
    encode(&one);
  }
}

static void encode_now(const passage *one, const float *before) {
  put_together(one);
  if (before != NULL) {
    replace_unused(one, one->values, NULL, 0, one->bucket->count);
  }
  if (!one->encoded->by_host) {
    encode(one);
  }
}

even_status even_sync_reduce_encoded(even_sync *sync, size_t bucket, uint64_t *moved, uint64_t *full) {
  passage one = passage_of(sync, bucket);
  const float *before = even_encoded_before(one.encoded, one.bucket);
  bool any = false;
  *moved = 0;
  *full = 0;
  EVEN_TRY(learn_used(&one, &any));
  bool made = even_sync_ahead_take(sync, bucket);
  if (!any) {
    return EVEN_OK;
  }
  if (!made) {
    encode_now(&one, before);
  }
  even_sync_ahead_ask(sync, bucket + 1);
  EVEN_TRY(one.encoded->by_host ? by_host(&one) : exchange(&one));
  if (before != NULL) {
    replace_unused(&one, one.values, before, 0, one.bucket->count);
  }
  put_back(&one);
  one.bucket->went = true;
  *moved = even_encoded_moved(one.encoded, one.bucket);
  *full = one.bucket->count * even_dtype_bytes(one.span->dtype);
  return EVEN_OK;
}
