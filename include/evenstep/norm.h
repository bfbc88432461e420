/* Batch normalisation over the samples of all ranks: what each rank found of its own samples, gathered and merged in
 * one collective call.
 *
 * Mean and variance are merged by Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
 * sample variances" (1979), eq. 2.1; backward is that of Ioffe and Szegedy, "Batch Normalization" (2015), section 3,
 * the sums over all ranks. All is computed in 64 bits and in the order of the ranks, every operation rounded once: all
 * ranks get the same bits.
 *
 * Threads: a call is a collective of the group, under its rules. No pointer may be NULL but where it says so. */
#ifndef EVENSTEP_NORM_H
#define EVENSTEP_NORM_H

#include <evenstep/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a rank brings. */
typedef struct even_norm_values {
  size_t size;        /* sizeof(even_norm_values) */
  double mark[2];     /* of the call: the same numbers on all ranks, or they are in different calls */
  double number;      /* how many values a channel are this rank's, or how much its sums weigh; >= 0 */
  even_dtype dtype;   /* of what follows: EVEN_F32 or EVEN_F64 */
  size_t channels;    /* the same on all ranks */
  const void *first;  /* [channels] means, or sums; NULL: zeros */
  const void *second; /* [channels] variances (biased), or other sums; NULL: zeros */
} even_norm_values;

/* What all ranks brought together. */
typedef struct even_norm_whole {
  double *numbers; /* [ranks] what each brought */
  double *first;   /* [channels] */
  double *second;  /* [channels] */
  bool alike;      /* false: marks differ, and all else is undefined; the same on all ranks */
} even_norm_whole;

/* Collective: the mean of all ranks' values of each channel (first) and their biased variance (second), zeros where
 * there are none. Errors: EVEN_ERR_ARGUMENT (another dtype, more channels than a size holds), EVEN_ERR_MISMATCH (other
 * numbers of channels), those of a collective. */
EVEN_PUBLIC even_status even_norm_statistics(even_comm *comm, const even_norm_values *mine,
                                             even_norm_whole *out) EVEN_MUST_USE;
/* Collective: each channel's sums over all ranks of number * first and of number * second. The same errors. */
EVEN_PUBLIC even_status even_norm_sums(even_comm *comm, const even_norm_values *mine,
                                       even_norm_whole *out) EVEN_MUST_USE;

/* One layer's backward, after even_norm_sums of its sums of g (first) and of g x̂ (second), g the loss's derivative. */
typedef struct even_norm_backward {
  size_t size;      /* sizeof(even_norm_backward) */
  even_dtype dtype; /* of what follows and of the result */
  size_t channels;
  const void *variance; /* [channels] of all ranks' values */
  const void *weight;   /* [channels] the layer's own factors; NULL: ones */
  double eps;
  double values; /* a channel's, of all ranks together; >= 1 */
  double part;   /* this rank's number in even_norm_sums; > 0 */
} even_norm_backward;

/* What the gradient of a layer's input owes to the statistics: slope[c] x̂ + shift[c] is to be added to it. No
 * collective. Errors: EVEN_ERR_ARGUMENT (another dtype). */
EVEN_PUBLIC even_status even_norm_through(const even_norm_backward *layer, const even_norm_whole *sums, void *slope,
                                          void *shift) EVEN_MUST_USE;
/* running = (1 - momentum) running + momentum value * factor, of `channels` running values of dtype EVEN_F32 or
 * EVEN_F64: value * factor in 64 bits, all else rounded in that type. No collective. Errors: EVEN_ERR_ARGUMENT (another
 * dtype). */
EVEN_PUBLIC even_status even_norm_follow(void *running, even_dtype dtype, const double *values, size_t channels,
                                         double momentum, double factor) EVEN_MUST_USE;

/* Numbers of one layer, as they lie in memory: `outer` times, for each of `channels`, `inner` of them. */
typedef struct even_norm_layout {
  size_t size; /* sizeof(even_norm_layout) */
  even_dtype dtype;
  size_t outer;
  size_t channels;
  size_t inner;
} even_norm_layout;

/* Each channel's mean and biased variance; zeros where there are no numbers. Sums of up to 2,047 numbers are formed
 * in the numbers' own type, in an order that is the same on every processor, all else in 64 bits. No collective.
 * Errors: EVEN_ERR_ARGUMENT (another dtype, more numbers than a size holds). */
EVEN_PUBLIC even_status even_norm_moments(const even_norm_layout *layout, const void *x, double *mean,
                                          double *variance) EVEN_MUST_USE;
/* The gradient of a layer's input: out = weight g / sqrt(variance + eps) + slope x̂ + shift, x̂ = (x - mean) /
 * sqrt(variance + eps). The last six have one number a channel, of the layout's type; weight: NULL: ones. out overlaps
 * none of them. No collective. Errors: EVEN_ERR_ARGUMENT (another dtype, more numbers than a size holds),
 * EVEN_ERR_MEMORY. */
EVEN_PUBLIC even_status even_norm_input(const even_norm_layout *layout, const void *g, const void *x, const void *mean,
                                        const void *variance, double eps, const void *weight, const void *slope,
                                        const void *shift, void *out) EVEN_MUST_USE;

#ifdef __cplusplus
}
#endif

#endif
