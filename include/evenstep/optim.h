/* Optimizers of parameters in the hosts' memory: SGD, Adam and AdamW, whose states the ranks of one host have once, in
 * shared memory, and of which each rank does as many pieces of a step as it comes to.
 *
 * A step changes every element by itself, so that the parameters are cut into pieces of 16,384 elements and each piece
 * is done by one rank: its own first, then what others have not begun. A slow rank, or one whose core is shared, does
 * fewer of them, and all end at the same time. Every operation is rounded once and alike on every instruction set
 * (there is no fused multiply-add): the bits depend neither on who did a piece nor on the machine, so that several
 * hosts, which each make the whole step, stay equal.
 *
 * The methods are torch.optim's: SGD with momentum (Sutskever et al., "On the importance of initialization and momentum
 * in deep learning", 2013), Adam (Kingma and Ba, 2015) with AMSGrad (Reddi et al., 2018), AdamW (Loshchilov and Hutter,
 * 2019). Parameters in F16 and BF16 have values in fp32 beside them, from which they are rounded after each step, and
 * states in fp32. */
#ifndef EVENSTEP_OPTIM_H
#define EVENSTEP_OPTIM_H

#include <evenstep/comm.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct even_optim even_optim;

#define EVEN_OPTIM_STATES 3 /* at most, numbers that an element has beside its value */

typedef enum even_optim_method {
  EVEN_OPTIM_SGD = 0,  /* states: 0, or 1 (momentum buffer) */
  EVEN_OPTIM_ADAM = 1, /* states: 2 (first and second moment), or 3 (largest second moment so far: AMSGrad) */
  EVEN_OPTIM_ADAMW = 2 /* the same; the decay of weights is no part of the gradient */
} even_optim_method;

typedef struct even_optim_parameter {
  size_t count;     /* elements, 0 allowed */
  even_dtype dtype; /* F32, F64, F16, BF16 */
  int states;       /* 0 … EVEN_OPTIM_STATES: so many numbers an element, F64 for F64, else F32 */
} even_optim_parameter;

typedef struct even_optim_params {
  size_t size; /* sizeof(even_optim_params) */
  const even_optim_parameter *parameters;
  size_t parameter_count;
  /* A rank that ends in a step leaves nothing half done: what a piece was is kept until it is done (a copy of 64 to 512
   * KB a rank, which stays in the caches), and those that are left do its pieces again. The same on all ranks. */
  bool survives;
  unsigned char reserved[7]; /* 0 */
} even_optim_params;

/* How the elements of one parameter change in one step; all finite, betas in [0, 1), the others as their method has
 * them. */
typedef struct even_optim_rule {
  even_optim_method method;
  bool amsgrad;  /* Adam, AdamW */
  bool nesterov; /* SGD */
  bool maximize;
  double lr;
  double weight_decay;
  double momentum, dampening; /* SGD */
  double beta1, beta2, eps;   /* Adam, AdamW */
} even_optim_rule;

/* One parameter in one step. `rule` and `step` are the same on all ranks, and so is what the pointers lead to (but for
 * even_optim_job.parts). */
typedef struct even_optim_input {
  void *values;         /* this rank's own copy; changed */
  const void *gradient; /* as many elements of the same dtype, in the same order; NULL: it stays as it is */
  uint32_t rule;        /* which of the rules */
  uint64_t step; /* how many steps it has been given with this one: 1, …; of SGD 1 says that it has no momentum yet */
} even_optim_input;

/* One step. All of it is the same on all ranks, but for what the pointers of the inputs are. */
typedef struct even_optim_job {
  size_t size; /* sizeof(even_optim_job) */
  const even_optim_rule *rules;
  size_t rule_count;
  const even_optim_input *inputs; /* one a parameter */
  /* NULL: gradients are whole, on every rank. Else a group of the same ranks in the same order, over "shm", in whose
   * arena each rank's inputs have a part of every gradient, at the same place on all ranks (even_sync_params.unsummed
   * leaves them so): whoever does a piece forms the sum over the ranks of what it needs, in rank order and rounded as
   * even_comm_all_reduce does. So the gradients are reduced and scattered to owners that are as unequal as the ranks'
   * speeds, and gathered by nobody (the second stage of Rajbhandari et al., "ZeRO", SC 2020). The parts are read until
   * this returns, and may be overwritten by it. Not together with `survives`. */
  even_comm *parts;
  /* Not 0: gradients count as multiplied by max_norm / (norm + 1e-6), where that is less than 1; norm is the root of
   * the sum of the squares of all elements that have a gradient (Pascanu et al., "On the difficulty of training
   * recurrent neural networks", ICML 2013). The gradients themselves stay as they are. */
  double max_norm;
  /* NULL, or with `survives` called some ten times a second, on the caller's thread, while this rank waits for one that
   * has not ended: it may stand still, and who can end it would hear of it nowhere else. */
  void (*waits)(void *context);
  void *waits_context;
} even_optim_job;

typedef struct even_optim_report {
  double norm;        /* as above, of all gradients; 0 where max_norm is 0 */
  uint64_t elements;  /* that this rank did */
  uint64_t all;       /* of all parameters that had a gradient */
  uint64_t update_ns; /* in which it did them */
  uint64_t wait_ns;   /* until the others had, before and after */
  uint64_t copy_ns;   /* in which it took the others' values */
} even_optim_report;

/* Threads: one caller's, one call after the other. No pointer may be NULL but where it says so. */

/* States of zeros. `comm` NULL: this process alone. Else collective: a group of ranks of one host, the same parameters
 * on all; it must outlive this, and is used inside even_optim_open and even_optim_step alone. Errors: EVEN_ERR_ARGUMENT
 * (also a group over several hosts), EVEN_ERR_OVERFLOW, EVEN_ERR_MEMORY, EVEN_ERR_NO_SPACE, EVEN_ERR_PERMISSION,
 * EVEN_ERR_SYSTEM, EVEN_ERR_MISMATCH (other parameters on another rank), on all ranks where one of them has it, and
 * those of the collectives. */
EVEN_PUBLIC even_status even_optim_open(const even_optim_params *params, even_comm *comm,
                                        even_optim **out) EVEN_MUST_USE;
/* NULL is allowed. Its memory goes with the last rank that closes it. */
EVEN_PUBLIC void even_optim_close(even_optim *optim);

/* The memory that all ranks of the group have, page-aligned, and its bytes. */
EVEN_PUBLIC void *even_optim_memory(even_optim *optim);
EVEN_PUBLIC size_t even_optim_bytes(const even_optim *optim);
/* In it state `state` (0 …) of a parameter: `count` numbers, F64 for F64 parameters, else F32; after the last one, of
 * F16 and BF16, the values in fp32. NULL where there is no such state. Read and written between steps alone. */
EVEN_PUBLIC void *even_optim_state(even_optim *optim, size_t parameter, int state);

/* One step of the parameters that have a gradient. Where none has one, nothing is done. Else collective where there is
 * a group: it begins when all ranks have come, and when it returns all parameters of this rank have their new values. A
 * value that was changed since the last step (a checkpoint was loaded, weights were clipped) is where the step goes on
 * from; it must be the same on all ranks. `report` may be NULL. Errors: EVEN_ERR_ARGUMENT (nothing done), and those of
 * the barriers, whose group is over then: what the ranks did of the step is torn. With `survives` no error comes of a
 * rank that has ended: the step is made by those that are left, which wait, at most 10 minutes, for who stands still;
 * so are later ones, although the group is over. What the ranks share changes only once all that are left have come to
 * the step. A rank that finds the group over, and not all there, makes the step, and all later ones, alone, in a copy
 * of the memory, at the same address. EVEN_ERR_MEMORY where there is no room for one, which is asked for before it is
 * made (even_memory_ask): nothing was done, and the others go on without this rank. */
EVEN_PUBLIC even_status even_optim_step(even_optim *optim, const even_optim_job *job,
                                        even_optim_report *report) EVEN_MUST_USE;

#ifdef __cplusplus
}
#endif

#endif
