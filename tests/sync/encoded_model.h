/* What ranks whose gradients travel encoded have after each round, computed by one of them for all, by the simplest
 * means: without an engine, a group, or memory that is used twice. */
#ifndef EVEN_TEST_ENCODED_MODEL_H
#define EVEN_TEST_ENCODED_MODEL_H

#include "sync/encoding.h"
#include "sync/layout.h"

#include <stdbool.h>

enum { MODEL_PARAMETERS = 7, MODEL_ROUNDS = 8, MODEL_BAD_ROUND = 4, MODEL_RANKS = 5 };

extern const even_sync_parameter model_parameters[MODEL_PARAMETERS];

/* The parameters, an encoding and a way; small buckets. */
even_sync_params model_params(even_sync_encoding encoding, even_sync_way way);

typedef struct model {
  even_sync_params params;
  even_encoding encoding;
  even_sync_layout layout;
  int ranks;
  int encoders;             /* those who encode: the ranks, or the hosts that host_of says */
  const int *host_of;       /* NULL: each rank encodes its own */
  float *left[MODEL_RANKS]; /* a value for each of the buckets' values, in their order */
  float *left_of_sums;      /* of the ranks whose parts they are */
  float *sums;              /* of the round */
  uint8_t used[MODEL_PARAMETERS];
  bool finite;
} model;

/* host_of: of each rank, or NULL. False without memory. Close it in any case. */
bool model_open(model *m, const even_sync_params *params, int ranks, const int *host_of);
void model_close(model *m);

/* Of each rank and round: its part of the batch (zero of some), which parameters have a gradient, and that. */
double model_weight(int rank, int ranks, int round);
bool model_has(int rank, int round, size_t parameter);
void model_gradient(int rank, int round, size_t parameter, void *out);
uint32_t model_step(int round);

/* Makes the sums and what is left out. */
void model_round(model *m, int round);
/* Where a parameter's values begin in left and sums. */
size_t model_first(const model *m, size_t parameter);
/* The part of its bucket's values, as places in left and sums, that one of those who encode encodes the sums of. */
void model_part(const model *m, size_t bucket, int encoder, size_t *first, size_t *count);
/* Which of those who encode a rank is; -1: none, its host's first rank encodes for it. */
int model_encoder(const model *m, int rank);

#endif
