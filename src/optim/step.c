/* A step: pieces, by whoever is free; and what becomes of it where a rank ends in it. */
#include "base/checked.h"
#include "base/fail.h"
#include "base/params.h"
#include "optim/work.h"
#include "os/clock.h"
#include "os/memory_use.h"
#include "os/process.h"
#include "os/process_stat.h"

#include <math.h>
static bool in_range(double value, double least, double below) {
  return value >= least && value < below;
}

static even_status check_rule(const even_optim_rule *rule, size_t number) {
  bool sgd = rule->method == EVEN_OPTIM_SGD;
  if (!sgd && rule->method != EVEN_OPTIM_ADAM && rule->method != EVEN_OPTIM_ADAMW) {
    return even_fail(EVEN_ERR_ARGUMENT, "rule %zu: no method has the number %d", number, (int)rule->method);
  }
  bool right = isfinite(rule->lr) && isfinite(rule->weight_decay) && isfinite(rule->momentum) &&
               isfinite(rule->dampening) && isfinite(rule->eps) &&
               (sgd || (in_range(rule->beta1, 0, 1) && in_range(rule->beta2, 0, 1)));
  if (!right) {
    return even_fail(
        EVEN_ERR_ARGUMENT,
        "rule %zu: lr %g, weight_decay %g, momentum %g, dampening %g, betas %g and %g, eps %g: all have to "
        "be finite, the betas in [0, 1)",
        number, rule->lr, rule->weight_decay, rule->momentum, rule->dampening, rule->beta1, rule->beta2, rule->eps);
  }
  return EVEN_OK;
}

static bool is_aligned(const void *pointer, even_dtype dtype) {
  return (uintptr_t)pointer % even_dtype_bytes(dtype) == 0;
}

static even_status check_job(const even_optim *optim, const even_optim_job *job) {
  const even_optim_rule *rules = job->rules;
  size_t rule_count = job->rule_count;
  if (!(job->max_norm >= 0)) {
    return even_fail(EVEN_ERR_ARGUMENT, "max_norm %g: more than 0, or 0 for none", job->max_norm);
  }
  for (size_t i = 0; i < rule_count; i++) {
    EVEN_TRY(check_rule(&rules[i], i));
  }
  for (size_t i = 0; i < optim->parameter_count; i++) {
    const even_optim_input *one = &job->inputs[i];
    const even_optim_place *of = &optim->places[i];
    if (one->gradient == NULL || of->count == 0) {
      continue;
    }
    if (one->rule >= rule_count || one->step == 0 || one->values == NULL) {
      return even_fail(EVEN_ERR_ARGUMENT, "parameter %zu has rule %u of %zu, step %llu and values at %p", i, one->rule,
                       rule_count, (unsigned long long)one->step, one->values);
    }
    if (even_optim_states_of(&rules[one->rule]) > of->states) {
      return even_fail(EVEN_ERR_ARGUMENT, "parameter %zu has %d states, rule %u wants %d", i, of->states, one->rule,
                       even_optim_states_of(&rules[one->rule]));
    }
    if (!is_aligned(one->values, of->dtype) || !is_aligned(one->gradient, of->dtype)) {
      return even_fail(EVEN_ERR_ARGUMENT, "parameter %zu: values or gradient are not aligned to their elements", i);
    }
  }
  return job->parts == NULL ? EVEN_OK : even_optim_check_parts(optim, job);
}

/* ---- among others ---- */

static even_status meet(const even_optim *optim, uint64_t *since, uint64_t *waited) {
  even_status status = optim->comm == NULL ? EVEN_OK : even_comm_barrier(optim->comm);
  uint64_t now = even_clock_ns();
  *waited += now - *since;
  *since = now;
  return status;
}

static bool has_ended(const even_optim_process *process) {
  even_process_stat facts;
  if (even_process_has_ended((pid_t)process->number)) {
    return true;
  }
  return process->start_time != 0 && even_process_stat_read((pid_t)process->number, &facts) == 0 &&
         facts.start_time != process->start_time;
}

#define LOOK_NS UINT64_C(200000)           /* between two looks at what another rank does */
#define TELL_NS UINT64_C(100000000)        /* between two calls of even_optim_job.waits */
#define SOON_NS UINT64_C(20000000)         /* in which the others come, if they come: a copy is memory */
#define PATIENCE_NS UINT64_C(600000000000) /* for one that stands still, and neither goes on nor ends */

typedef struct waiting {
  uint64_t tell_ns, until_ns;
} waiting;

static waiting begin_to_wait(void) {
  uint64_t now = even_clock_ns();
  return (waiting){.tell_ns = now + TELL_NS, .until_ns = now + PATIENCE_NS};
}

/* For another rank, until the next look; false once that has lasted too long. */
static bool wait_on(const even_optim_work *of, waiting *its) {
  uint64_t now = even_clock_ns();
  if (now >= its->tell_ns && of->job->waits != NULL) {
    of->job->waits(of->job->waits_context);
    its->tell_ns = now + TELL_NS;
  }
  even_clock_sleep_ns(LOOK_NS);
  return now < its->until_ns;
}

/* ---- the beginning, where ranks may end ----
 * The barrier may fail on some and not on others. A rank that it fails on may be the only one that makes this step: the
 * others, which have not come, take it back if that one ends before it has told them. So nobody changes what all share
 * before all that are left have come; who cannot wait for that makes the step in a copy. Each says in its word `came`
 * that it has come, and while it looks who else has; of two that look, one sees the other (the order is that of
 * sequential consistency), and who changes first waits for the looks, and copies, of all. */

#define CAME(number) ((number) << 1)
#define LOOKS ((uint64_t)1)
#define HAS_LEFT (UINT64_MAX - LOOKS) /* it comes to no step here any more */

static bool all_have_come(const even_optim_work *of) {
  for (int r = 0; r < of->optim->ranks; r++) {
    if (atomic_load(&even_optim_kept_of(of->optim, r)->came) < CAME(of->round.number) &&
        !has_ended(&of->optim->processes[r])) {
      return false;
    }
  }
  return true;
}

static even_status await_looks(const even_optim_work *of) {
  waiting its = begin_to_wait();
  for (int r = 0; r < of->optim->ranks; r++) {
    while ((atomic_load(&even_optim_kept_of(of->optim, r)->came) & LOOKS) != 0 &&
           !has_ended(&of->optim->processes[r])) {
      if (!wait_on(of, &its)) {
        return even_fail(EVEN_ERR_TIMEOUT, "rank %d stands still in an optimizer's step", r);
      }
    }
  }
  return EVEN_OK;
}

/* What the copy of another rank that looks may still take: what is copied is no longer free. */
static size_t still_to_copy(const even_optim *optim, int rank) {
  const even_optim_kept *its = even_optim_kept_of(optim, rank);
  if ((atomic_load(&its->came) & LOOKS) == 0 || has_ended(&optim->processes[rank])) {
    return 0;
  }
  uint64_t copied = atomic_load(&its->copied);
  return copied < optim->memory.bytes ? optim->memory.bytes - (size_t)copied : 0;
}

/* Before the kernel ends a rank for it. Whoever looks may make a copy, too, at the same time: each asks for what those
 * of all that it sees still take, so that the last to look has asked for all. */
static even_status ask_for_copy(const even_optim_work *of) {
  const even_optim *optim = of->optim;
  size_t copies = 1;
  size_t bytes = optim->memory.bytes;
  for (int r = 0; r < optim->ranks; r++) {
    size_t more = r == optim->rank ? 0 : still_to_copy(optim, r);
    copies += more > 0;
    if (!even_add_size(bytes, more, &bytes)) {
      bytes = SIZE_MAX;
    }
  }
  even_status status = even_memory_ask(
      NULL, bytes, copies == 1 ? "a copy of the optimizer's states" : "copies of the optimizer's states");
  if (status != EVEN_ERR_MEMORY) {
    even_error_clear();
    return EVEN_OK; /* also where nobody can say */
  }
  (void)even_error_prefix("a rank was lost, and not all others have come to the step");
  (void)even_error_fix(
      "start fewer ranks on this host, or give the job more memory; --recovery restart makes no copies");
  return even_error_place(optim->rank, NULL);
}

/* From here on this rank's states are its own. */
static even_status leave(even_optim_work *of) {
  even_optim *optim = of->optim;
  even_shared_memory shared;
  even_optim_kept *own = even_optim_kept_of(optim, optim->rank);
  size_t word = (size_t)((char *)&own->came - (char *)optim->memory.address);
  size_t copied = (size_t)((char *)&own->copied - (char *)optim->memory.address);
  even_status status = ask_for_copy(of);
  if (status == EVEN_OK) {
    status = even_shared_memory_leave(&optim->memory, copied, &shared);
  }
  char *memory = status == EVEN_OK ? shared.address : optim->memory.address;
  atomic_store((_Atomic uint64_t *)(void *)(memory + word), HAS_LEFT);
  if (status == EVEN_OK) {
    even_shared_memory_close(&shared);
    optim->comm = NULL;
    optim->survives = false;
    optim->rank = of->round.rank = of->sums.rank = 0;
    optim->ranks = of->round.ranks = of->sums.ranks = 1;
  }
  return status;
}

/* After the barrier, whose status this is. */
static even_status begin_surviving(even_optim_work *of, even_status met) {
  _Atomic uint64_t *came = &even_optim_kept_of(of->optim, of->optim->rank)->came;
  if (met != EVEN_OK) {
    uint64_t until = even_clock_ns() + SOON_NS;
    while (!all_have_come(of) && even_clock_ns() < until) {
      even_clock_sleep_ns(LOOK_NS);
    }
    atomic_store(came, CAME(of->round.number) | LOOKS);
    if (!all_have_come(of)) {
      return leave(of);
    }
    atomic_store(came, CAME(of->round.number));
  }
  return await_looks(of);
}

static even_status begin(even_optim_work *of, uint64_t *at_ns, uint64_t *waited_ns) {
  even_optim *optim = of->optim;
  if (!optim->survives) {
    return meet(optim, at_ns, waited_ns);
  }
  atomic_store(&even_optim_kept_of(optim, optim->rank)->came, CAME(of->round.number));
  even_status status = begin_surviving(of, meet(optim, at_ns, waited_ns));
  *at_ns = even_clock_ns();
  return status;
}

/* ---- rounds ---- */

/* Does a piece that this rank has; gives the elements that it changes. */
typedef size_t piece_call(even_optim_work *of, size_t piece);

/* In place of that at a round's end: until all pieces are done, those of ranks that have ended by this rank or another
 * one. */
static even_status finish_pieces(even_optim_work *of, const even_optim_round *round, piece_call *call, even_status why,
                                 uint64_t *elements) {
  const even_error first = *even_error_last();
  waiting its = begin_to_wait();
  for (size_t piece = 0; piece < round->pieces; piece++) {
    int holder;
    while ((holder = even_optim_round_holder(round, piece)) >= 0) {
      if (has_ended(&of->optim->processes[holder])) {
        if (even_optim_round_take_over(round, piece, holder)) {
          if (round == &of->round) {
            even_optim_put_piece_back(of, piece);
          }
          *elements += call(of, piece);
        }
      } else if (!wait_on(of, &its)) {
        return first.status == why ? even_error_restore(&first) : why;
      }
    }
  }
  return EVEN_OK;
}

/* All pieces once, by all ranks, until all are done. */
static even_status make_round(even_optim_work *of, even_optim_round *round, piece_call *call, uint64_t *at_ns,
                              even_optim_report *seen) {
  even_optim_round_begin(round);
  for (size_t piece = 0; even_optim_round_take(round, &piece);) {
    seen->elements += call(of, piece);
  }
  uint64_t now = even_clock_ns();
  seen->update_ns += now - *at_ns;
  *at_ns = now;
  even_status status = meet(of->optim, at_ns, &seen->wait_ns);
  if (status != EVEN_OK && of->optim->survives) {
    status = finish_pieces(of, round, call, status, &seen->elements);
    *at_ns = even_clock_ns();
  }
  return status;
}

/* What is the same for all elements; gives how many have a gradient. */
static uint64_t work_out(even_optim *optim, const even_optim_job *job) {
  uint64_t all = 0;
  for (size_t i = 0; i < optim->parameter_count; i++) {
    const even_optim_input *one = &job->inputs[i];
    if (one->gradient != NULL && optim->places[i].count > 0) {
      even_optim_factors_of(&job->rules[one->rule], one->step, &optim->factors[i]);
      all += optim->places[i].count;
    }
  }
  return all;
}

/* As torch.nn.utils.clip_grad_norm_ does, NaN included. */
static void clip(even_optim_work *of, double norm) {
  double part = of->job->max_norm / (norm + 1e-6);
  for (size_t i = 0; i < of->optim->parameter_count && !(part >= 1); i++) {
    of->optim->factors[i].scale *= part;
  }
}

/* Once there is something to do. */
static even_status make_step(even_optim_work *of, even_optim_report *seen) {
  even_optim *optim = of->optim;
  uint64_t at_ns = even_clock_ns();
  EVEN_TRY(begin(of, &at_ns, &seen->wait_ns)); /* the others have the last step's values */
  if (of->job->max_norm != 0) {
    EVEN_TRY(make_round(of, &of->sums, even_optim_square_piece, &at_ns, seen));
    seen->norm = even_optim_norm(of);
    clip(of, seen->norm);
  }
  EVEN_TRY(make_round(of, &of->round, even_optim_do_piece, &at_ns, seen));
  for (size_t piece = 0; optim->ranks > 1 && piece < optim->piece_count; piece++) {
    if (!even_optim_round_is_own(&of->round, piece)) {
      even_optim_take_piece(of, piece);
    }
  }
  seen->copy_ns = even_clock_ns() - at_ns;
  return EVEN_OK;
}

even_status even_optim_step(even_optim *optim, const even_optim_job *job, even_optim_report *report) {
  even_optim_report seen = {0};
  even_optim_job own;
  EVEN_TRY(EVEN_TAKE_PARAMS(even_optim_job, &own, job));
  job = &own;
  EVEN_TRY(check_job(optim, job));
  seen.all = work_out(optim, job);
  if (seen.all > 0) {
    even_optim_round round = {.words = even_optim_at(optim, 0),
                              .pieces = optim->piece_count,
                              .number = ++optim->number,
                              .rank = optim->rank,
                              .ranks = optim->ranks};
    even_optim_work of = {.optim = optim, .job = job, .round = round, .sums = round};
    of.sums.words = even_optim_at(optim, optim->sums);
    EVEN_TRY(make_step(&of, &seen));
  }
  if (report != NULL) {
    *report = seen;
  }
  return EVEN_OK;
}
