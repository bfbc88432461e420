/* Buckets that travel encoded: what the engine keeps for them. All memory is got when it is opened: a round asks for
 * none.
 *
 * Those who encode are the ranks; in a group over several hosts with several ranks on some, the hosts: their leaders
 * bring what the host's ranks have together. */
#ifndef EVEN_SYNC_ENCODED_H
#define EVEN_SYNC_ENCODED_H

#include "sync/encoding.h"
#include "sync/layout.h"

typedef struct even_encoded_bucket {
  size_t count;     /* values; 0: it travels as it is */
  size_t first;     /* where they begin in what is kept */
  size_t own_first; /* the part of the values whose sums this rank encodes; none where they are gathered */
  size_t own_count;
  size_t sums_first; /* where that part begins in what is kept of sums */
  bool in_parts;
  bool went;      /* encoded in this round */
  bool discarded; /* the last round, whose sums were finite: the other memory holds what that left out */
  uint8_t turn;   /* which of the two memories holds what was left out before this round */
} even_encoded_bucket;

typedef struct even_encoded {
  even_encoding encoding;
  even_sync_way way;
  uint64_t seed;
  bool by_host; /* one encoding a host */
  bool encodes; /* this rank: of several hosts the leader alone */
  int rank;     /* among those who encode: this rank's, or its host's */
  int ranks;    /* how many these are */
  bool keeps;   /* what is left out */
  bool finite;  /* all sums of this round, so far */
  bool counts;  /* this round: else what it leaves out is not kept */
  bool has_step;
  uint32_t step;
  uint64_t round_of_step;
  even_encoded_bucket *buckets;
  size_t values; /* of all buckets together, and in this rank's parts of them */
  size_t sums;
  float *left[2]; /* where nothing is kept, room for one bucket in each */
  float *left_of_sums[2];
  float *total;              /* one bucket, where its slots have gaps */
  unsigned char *payload[2]; /* this rank's encodings: of even buckets, of odd ones, as one may be made ahead */
  unsigned char *received;   /* those of all ranks */
  unsigned char *of_sum;     /* of its part of the sum */
  unsigned char *scratch[2]; /* the same */
  uint8_t *used;             /* of the members of the bucket under way: whether some rank has a gradient */
  size_t *sends;             /* bytes, one a rank */
  size_t *receives;
  const void **inputs;
  void **outputs;
} even_encoded;

/* *out is NULL where params->encoding is PLAIN. EVEN_ERR_ARGUMENT, EVEN_ERR_UNSUPPORTED (parts without messages),
 * EVEN_ERR_MEMORY, EVEN_ERR_OVERFLOW. */
even_status even_encoded_open(const even_sync_params *params, const even_sync_layout *layout, const even_comm *comm,
                              even_encoded **out) EVEN_MUST_USE;
void even_encoded_close(even_encoded *encoded);
void even_encoded_forget(even_encoded *encoded, const even_sync_layout *layout);

/* The beginning and the end of a round. */
void even_encoded_begin(even_encoded *encoded, uint32_t step);
void even_encoded_end(even_encoded *encoded, const even_sync_layout *layout);

/* The part of so many values that one of those who encode adds up. */
void even_encoded_part(const even_encoded *encoded, size_t count, int rank, size_t *first, size_t *part);
/* The bytes of a bucket that travel, as those of an all-reduce among those who encode. */
uint64_t even_encoded_moved(const even_encoded *encoded, const even_encoded_bucket *bucket);
/* What an encoding is rounded by: its own number for each who encodes, step, round of the step, bucket; and for each
 * part, from 1 on, the last of which is the sum's. */
uint64_t even_encoded_seed(const even_encoded *encoded, size_t bucket, size_t part);

/* Which of two memories a bucket has, whose neighbour may be encoded meanwhile. */
size_t even_encoded_parity(const even_encoded *encoded, const even_encoded_bucket *bucket);
/* Where a bucket's values are put together, which then hold what is left out; and what was left out of them before,
 * NULL where nothing is kept. Of sums the same. */
float *even_encoded_values(even_encoded *encoded, const even_encoded_bucket *bucket);
float *even_encoded_before(even_encoded *encoded, const even_encoded_bucket *bucket);
float *even_encoded_sum(even_encoded *encoded, const even_encoded_bucket *bucket);
float *even_encoded_sum_before(even_encoded *encoded, const even_encoded_bucket *bucket);

#endif
