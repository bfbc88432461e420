/* Gradient synchronisation: buckets in a group's arena, reduced by an engine thread
 * while backward still runs.
 *
 * sum_r weight_r * gradient_r is formed for every parameter (weight_r = n_r / N makes it the gradient of the
 * mean over the whole batch). Buckets are filled in reverse order of the parameters (which is that of
 * the model, or, reversed, that in which gradients were seen to come), as in Li et al., "PyTorch
 * Distributed", VLDB 2020, section 3.2, and reduced in one fixed order, so that all ranks issue the same collectives.
 *
 * With a `wire` of 16 bits, fp32 gradients travel as that: each rank rounds weight_r * gradient_r to the nearest, the
 * sum is formed in fp32 in the order of the ranks, rounded once more, and widened into the fp32 slots; the same bits on
 * all ranks, and half the bytes. Gradients of other types travel as they are.
 *
 * With an `encoding`, gradients of F32, F16 and BF16 travel as even_sync_encoding says, each bucket as soon as it is
 * full. A rank's values are weight_r * gradient_r (in the gradient's type), one parameter after the other without gaps,
 * and what earlier rounds left out of them (error feedback: Karimireddy et al., "Error Feedback Fixes SignSGD", ICML
 * 2019). All ranks have the same bits. What is left out of a parameter that no rank has a gradient for waits until one
 * has; where a sum of the round is not finite, all that was left out stays as it was, on all ranks.
 */
#ifndef EVENSTEP_SYNC_H
#define EVENSTEP_SYNC_H

#include <evenstep/comm_costs.h>
#include <evenstep/telemetry.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct even_sync even_sync;

typedef struct even_sync_parameter {
  size_t count;     /* elements */
  even_dtype dtype; /* F32, F64, F16, BF16 */
  int late;         /* not 0: expected without a gradient (frozen), so in buckets of its own, reduced last */
} even_sync_parameter;

/* How gradients are encoded, by blocks of a bucket's values. Blocks begin anew with each bucket. */
typedef enum even_sync_encoding {
  EVEN_SYNC_PLAIN, /* not: they travel in their own type, or as `wire` */
  EVEN_SYNC_INT8,  /* in 127ths of the largest of 256, rounded at random, right on average: nothing is kept (Alistarh et
                      al., "QSGD", NeurIPS 2017) */
  EVEN_SYNC_ONE_BIT, /* the sign, and the mean magnitude of 1024 (Seide et al., Interspeech 2014) */
  EVEN_SYNC_TOP      /* the largest by magnitude, and where they are (Aji and Heafield, EMNLP 2017) */
} even_sync_encoding;

/* What goes where. In a group over several hosts (even_comm_open_hosts) the ranks that this speaks of are the hosts: of
 * each, the values of all its ranks, and what these had left out before, are added up in rank order in shared memory,
 * and its first rank encodes the sum, keeps what it leaves out of it, and has the result for all. */
typedef enum even_sync_way {
  EVEN_SYNC_CHEAPER, /* PARTS from EVEN_SYNC_PARTS_RANKS ranks on, of buckets of EVEN_SYNC_PARTS_BYTES or more as they
                        travel (with fewer a second call costs more than the bytes), where the group has messages */
  EVEN_SYNC_GATHER,  /* each rank's encoding to every other, added up in rank order: of n ranks each sends n - 1 times
                        its encoding */
  EVEN_SYNC_PARTS /* a bucket is cut into a part (of whole blocks) for each rank, who adds up all ranks' encodings of it
                     in rank order, and encodes the sum, which goes to all: 2 (n - 1) / n times an encoding,
                     whatever n. Encoded twice: the part's rank keeps what it leaves out of the sum and adds it to the
                     next (Tang et al., "DoubleSqueeze", ICML 2019). Needs a group with messages, or over several
                     hosts */
} even_sync_way;

enum { EVEN_SYNC_PARTS_RANKS = 4, EVEN_SYNC_PARTS_BYTES = 32768 };

typedef struct even_sync_params {
  size_t size; /* sizeof(even_sync_params) */
  const even_sync_parameter *parameters;
  size_t parameter_count;
  size_t bucket_bytes;       /* cap of a bucket; 0: 4 MiB. A larger parameter has a bucket of its own */
  size_t first_bucket_bytes; /* cap of the bucket reduced first; 0: 256 KiB */
  size_t bucket_elements;    /* not 0: the cap in elements, whatever their dtype, in place of bucket_bytes, and of the
                                first    bucket where that is less than first_bucket_bytes */
  size_t arena_offset;       /* where in the group's arena the buckets may begin; a multiple of 64 */
  even_dtype wire; /* F16 or BF16: what fp32 gradients travel as; F32 (0): as they are. The same on all ranks */
  even_sync_encoding encoding; /* with one, `wire` is F32. These four are the same on all ranks: */
  even_sync_way way;           /* of an encoding */
  double ratio;                /* of TOP: the part that travels, more than 0, up to 1 */
  /* Not 0: no sums are formed. After even_sync_finish each slot holds weight * gradient of its rank (zeros where that
   * has none), and whoever wants a sum finds its parts in the ranks' arenas (even_comm_peer_arena;
   * even_optim_job.parts). Only over "shm" (else EVEN_ERR_UNSUPPORTED), without `wire` and `encoding`. The same on all
   * ranks. */
  int unsummed;
  /* Not 0: even_sync_know will be told. The last bucket has 64 bytes more, and says in them whether a gradient was not
   * finite. Without `encoding` and `unsummed` (else EVEN_ERR_ARGUMENT). The same on all ranks. */
  int static_graph;
  uint64_t seed;             /* of INT8 */
  even_telemetry *telemetry; /* one COMMUNICATION span a bucket goes there; NULL: none. Must outlive the engine */
} even_sync_params;

/* What the last even_sync_finish saw. Times in ns of the calling thread's or the engine's clock. */
typedef struct even_sync_report {
  uint64_t start_ns;         /* engine: when its first bucket was complete; even_clock_ns */
  uint64_t communication_ns; /* engine: packing and collectives, waiting for peers included */
  uint64_t peer_wait_ns;     /* engine: of it, waiting for peers to arrive */
  uint64_t exposed_ns;       /* how long even_sync_finish blocked its caller */
  uint64_t bytes;            /* reduced, as they travelled; of what is left unsummed half, as of a reduce-scatter */
  uint64_t full_bytes;       /* the same in the gradients' own types */
  uint32_t buckets;
  uint32_t
      nonfinite; /* parameters of which a gradient or the sum was not finite (even_sync_nonfinite): the same on all */
} even_sync_report;

/* Threads: open, begin, finish and close are one caller's, one after the other (any thread, if ordered). Ready may be
 * called by several threads at once, between a begin that has returned and a finish that has not been called; that the
 * last ready has returned before finish is called is the caller's to see to. Slot may be called any time; await says
 * when. No pointer may be NULL but where it says so. */

/* Bytes of arena that these parameters need (the same on all ranks): for even_comm_params.arena_bytes. */
EVEN_PUBLIC even_status even_sync_arena_bytes(const even_sync_params *params, size_t *out) EVEN_MUST_USE;
/* Starts the engine thread. The group must outlive the engine; while a round is open (begin … finish) no other thread
 * may call into the group. */
EVEN_PUBLIC even_status even_sync_open(const even_sync_params *params, even_comm *comm, even_sync **out) EVEN_MUST_USE;
/* Ends the engine thread. In the middle of a round the group is revoked, since peers may wait for this rank; not of one
 * whose sums are there (even_sync_complete), though nobody has asked for them. NULL is allowed. */
EVEN_PUBLIC void even_sync_close(even_sync *sync);
/* Where parameter `index` lies in this rank's arena: 64-byte aligned, count elements, contiguous. NULL where there is
 * no such parameter. Valid until even_sync_close. */
EVEN_PUBLIC void *even_sync_slot(even_sync *sync, size_t index);

/* Opens a round. `step` goes into its spans. weight >= 0; with weight 0 this rank's gradients count as zeros, whatever
 * they hold (NaN included). */
EVEN_PUBLIC even_status even_sync_begin(even_sync *sync, double weight, uint32_t step) EVEN_MUST_USE;
/* Parameter `index` has its gradient at `gradient` (count contiguous elements; the slot itself is allowed). The
 * memory must stay as it is until even_sync_finish. Of several calls for one parameter in one round one is taken, the
 * others are EVEN_ERR_STATE. */
EVEN_PUBLIC even_status even_sync_ready(even_sync *sync, size_t index, const void *gradient) EVEN_MUST_USE;
/* This rank makes nothing more ready in this round: its engine ends the round as even_sync_finish says, once the other
 * ranks have completed theirs or are in finish, and this returns at once. Finish still comes, and waits for that;
 * without this call ranks would meet there. Between a begin that has returned and a finish that has not been called;
 * once a round. EVEN_ERR_STATE outside a round, and in one that is complete. */
EVEN_PUBLIC even_status even_sync_complete(even_sync *sync) EVEN_MUST_USE;
/* Closes the round: parameters not made ready count as zeros, or, where no rank made them ready, are absent. (A caller
 * whose parameter holds an older gradient that must survive, as in accumulation, makes it ready before.)
 * Blocks until every slot holds its sum (or, `unsummed`, until all ranks' slots hold their parts). used[i]
 * (parameter_count bytes, may be NULL, as `report` may) is 1 where some rank made parameter i ready, else 0 (its slot
 * is then undefined). Errors: those of the collectives; the engine then refuses further rounds. */
EVEN_PUBLIC even_status even_sync_finish(even_sync *sync, uint8_t *used, even_sync_report *report) EVEN_MUST_USE;

/* Between rounds: from the next one on used[i] (parameter_count bytes) is the answer of every even_sync_finish, and
 * ranks no longer ask one another, which saves a collective; NULL: they ask again. Only where some gradient is not
 * finite, they do, to say whose. Parameters that a rank makes ready although `used` says that none has them are no
 * error here. The same on all ranks. EVEN_ERR_STATE inside a round; EVEN_ERR_ARGUMENT without `static_graph`. */
EVEN_PUBLIC even_status even_sync_know(even_sync *sync, const uint8_t *used) EVEN_MUST_USE;
/* Blocks until the slot of parameter `index` holds its sum of the round that is open (or was last): sums come in the
 * order of the buckets, each while later ones are under way. Only of a parameter that some rank made ready. Any thread,
 * several at once, also while another is in finish: after a begin has returned, and returns before the next begin or
 * close is called. EVEN_ERR_ARGUMENT where there is no such parameter; EVEN_ERR_STATE before the first round;
 * EVEN_ERR_UNSUPPORTED where sums are not formed (`unsummed`); what has ended the round. */
EVEN_PUBLIC even_status even_sync_await(even_sync *sync, size_t index) EVEN_MUST_USE;

/* Bits of even_sync_nonfinite. */
enum { EVEN_SYNC_NONFINITE_ANYWHERE = 1, EVEN_SYNC_NONFINITE_HERE = 2 };

/* Whether the gradient of parameter `index`, as it was handed over in the last round, held a NaN or an infinity: on
 * some rank, or in the sum (the same answer on all), on this one. One whose weight was 0 counts as zeros; one that
 * travels in 16 bits is looked at as it travels. Sums are looked at where they are, or were on their way, in fp16,
 * which sums of finite values may leave: then no rank's own need be at fault. In wider types they are not: the sum of
 * gradients that are all finite is finite where the weights add up to at most 1, and else where none is near the
 * largest number. Valid between rounds; 0 where there is no such parameter. */
EVEN_PUBLIC int even_sync_nonfinite(const even_sync *sync, size_t index);

/* Where the engine keeps what it has left out of a parameter so far: `count` values from the parameter's `first` on. */
typedef struct even_sync_left {
  float *values;
  size_t first;
  size_t count; /* 0: nothing is kept of it */
} even_sync_left;

/* What an encoding has left out of parameter `index`: of this rank's own gradients (all of the parameter), or,
 * `of_sums`, of the sums that this rank encodes for all. To be read, and written (what a checkpoint has kept), between
 * rounds; the memory is another after each. EVEN_ERR_STATE inside a round, EVEN_ERR_ARGUMENT where there is no such
 * parameter. */
EVEN_PUBLIC even_status even_sync_left_out(even_sync *sync, size_t index, int of_sums,
                                           even_sync_left *out) EVEN_MUST_USE;
/* In a round, before even_sync_complete and even_sync_finish: its sums will be used by nobody, so what it leaves out is
 * not kept, and what was left out before waits for the next. The same on all ranks. EVEN_ERR_STATE where no round is
 * open. */
EVEN_PUBLIC even_status even_sync_discard(even_sync *sync) EVEN_MUST_USE;
/* Between rounds, after one that was discarded: the sum of parameter `index` is used all the same, as the gradient of
 * the next round (it lies in the slot). What waited before is in that sum, so what the round left out of the parameter
 * waits in its place. Nothing where the last round was not discarded, or its sums were not finite. EVEN_ERR_STATE
 * inside a round, EVEN_ERR_ARGUMENT where there is no such parameter. */
EVEN_PUBLIC even_status even_sync_keep(even_sync *sync, size_t index) EVEN_MUST_USE;
/* Between rounds: nothing has been left out so far, and steps count their rounds anew (which is in the seed), as after
 * even_sync_open. EVEN_ERR_STATE inside a round. */
EVEN_PUBLIC even_status even_sync_forget(even_sync *sync) EVEN_MUST_USE;

/* ---- sizes of buckets by measurement ---- */

/* What was measured of rounds. Seconds count from any moment, the same for all. */
typedef struct even_sync_course {
  size_t size;                 /* sizeof(even_sync_course) */
  const double *ready_seconds; /* one a parameter: when its gradient is there, on the rank that has it last */
  double end_seconds;          /* when backward has ended, and what is not there will not come */
  even_comm_costs *costs;      /* what an all_reduce of this shape and engine costs by the way "call" */
  const char *shape;
  const char *engine;
  size_t arena_bytes; /* that there are; 0: enough */
} even_sync_course;

typedef struct even_sync_sizes {
  size_t bucket_bytes; /* as of even_sync_params */
  size_t first_bucket_bytes;
  double before_seconds; /* when the exchange ends with the sizes that were given, by the model */
  double seconds;        /* and with these */
} even_sync_sizes;

/* When the exchange of a round ends with these params: its buckets go one after the other, each once all ranks have all
 * its gradients, and cost what an all_reduce of their bytes does (the pipeline of Li et al., section 3.2). Costs of
 * packing, and what the engine's thread takes from backward where no core is spare, are not in it. EVEN_ERR_ARGUMENT;
 * EVEN_ERR_NOT_FOUND where the costs know nothing of such calls; those of even_sync_arena_bytes. Any thread. */
EVEN_PUBLIC even_status even_sync_predict(const even_sync_params *params, const even_sync_course *course,
                                          double *end_seconds) EVEN_MUST_USE;
/* The sizes by which that is soonest, of 256 KiB to 32 MiB (the first bucket: 64 KiB to 4 MiB); those of `params`
 * where none is a thousandth sooner. The same numbers give the same sizes; one rank decides for all. Sums do not depend
 * on sizes: the same bits with all, but with an `encoding`. */
EVEN_PUBLIC even_status even_sync_choose_sizes(const even_sync_params *params, const even_sync_course *course,
                                               even_sync_sizes *out) EVEN_MUST_USE;

#ifdef __cplusplus
}
#endif
#endif
