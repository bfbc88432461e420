/* What a balancer has learned, as bytes and back: numbers of 8 bytes, least significant first, in the order in which
 * one pass over its parts comes to them. The same pass writes and reads, so that the two cannot differ; what is made
 * anew before each use (tables, candidates, fixed splits) is no part of it. */
#include "balancer/state.h"
#include "base/fail.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { WORD = 8, VERSION = 1 };

static const uint64_t magic = UINT64_C(0x5245434e414c4142); /* "BALANCER" */
/* Steps, and what is counted by them; waits for a question are some more. */
static const int64_t most_steps = INT64_C(1) << 53;
static const int64_t most_wait = INT64_C(1) << 54;
static const int64_t longest_pause = INT64_C(1) << 20;
/* Steps of a series or a trial. */
enum { MOST_TAKEN = 1 << 30, MOST_BLOCK = 1 << 10 };
/* Sizes in a shape end below: see even_shape. */
static const double most_size = 0x1p40 - 1.0;

typedef struct record {
  uint8_t *out;      /* written to, as far as there is room; NULL where nothing is */
  const uint8_t *in; /* read from; NULL: written */
  size_t at;
  size_t size;
  bool sound; /* all that was read may be */
} record;

static void word(record *r, uint64_t *value) {
  bool room = r->size >= WORD && r->at <= r->size - WORD;
  r->sound = r->sound && (room || r->in == NULL);
  if (r->in != NULL) {
    *value = 0;
  }
  for (size_t i = 0; room && i < WORD; i++) {
    if (r->in != NULL) {
      *value |= (uint64_t)r->in[r->at + i] << (WORD * i);
    } else {
      r->out[r->at + i] = (uint8_t)(*value >> (WORD * i));
    }
  }
  r->at += WORD;
}

/* What is read is refused outside of `least` … `most`, and within them in any case. */
static void whole(record *r, int64_t *value, int64_t least, int64_t most) {
  uint64_t bits = (uint64_t)*value;
  word(r, &bits);
  if (r->in != NULL) {
    int64_t read = 0;
    memcpy(&read, &bits, sizeof read);
    bool within = read >= least && read <= most;
    r->sound = r->sound && within;
    *value = within ? read : least;
  }
}

static void count(record *r, int *value, int least, int most) {
  int64_t wide = *value;
  whole(r, &wide, least, most);
  *value = (int)wide;
}

static void flag(record *r, bool *value) {
  int64_t wide = *value ? 1 : 0;
  whole(r, &wide, 0, 1);
  *value = wide == 1;
}

static void bounded(record *r, double *value, double least, double most) {
  uint64_t bits = 0;
  memcpy(&bits, value, sizeof bits);
  word(r, &bits);
  if (r->in != NULL) {
    double read = 0.0;
    memcpy(&read, &bits, sizeof read);
    bool within = read >= least && read <= most; /* not where it is no number */
    r->sound = r->sound && within;
    *value = within ? read : 0.0;
  }
}

static void number(record *r, double *value) {
  bounded(r, value, -DBL_MAX, DBL_MAX);
}

static void amount(record *r, double *value) {
  bounded(r, value, 0.0, DBL_MAX);
}

static void amounts(record *r, double *values, size_t many) {
  for (size_t i = 0; i < many; i++) {
    amount(r, &values[i]);
  }
}

static void counts(record *r, int64_t *values, size_t many, int64_t least) {
  for (size_t i = 0; i < many; i++) {
    whole(r, &values[i], least, INT64_MAX);
  }
}

static void timings(record *r, even_step_timing *values, size_t many) {
  for (size_t i = 0; i < many; i++) {
    whole(r, &values[i].samples, 0, INT64_MAX);
    amount(r, &values[i].busy_seconds);
  }
}

/* Of a ring with room for `most` the entries that were taken. */
static size_t kept(int64_t taken, int64_t most) {
  return (size_t)(taken < most ? taken : most);
}

static void size_of(record *r, even_size *size) {
  bounded(r, &size->samples, 0.0, most_size);
  amount(r, &size->seconds);
  amount(r, &size->steps);
  whole(r, &size->seen, 0, most_steps);
  whole(r, &size->stays, 0, most_steps);
  amount(r, &size->off);
  flag(r, &size->doubtful);
}

static void shape(record *r, even_shape *s) {
  count(r, &s->count, 0, EVEN_SHAPE_SIZES);
  for (int i = 0; i < s->count; i++) {
    size_of(r, &s->size[i]);
    r->sound = r->sound && (i == 0 || s->size[i].samples > s->size[i - 1].samples);
  }
  whole(r, &s->taken, 0, most_steps);
  whole(r, &s->stay, 0, most_steps);
  amount(r, &s->last);
  whole(r, &s->stays, 0, most_steps);
  amount(r, &s->scatter);
  amount(r, &s->scatter_steps);
  amount(r, &s->stalls);
  amount(r, &s->changes);
  flag(r, &s->bent);
  amount(r, &s->tile);
  count(r, &s->points, s->bent ? 1 : 0, EVEN_SHAPE_SIZES);
  for (int i = 0; i < s->points; i++) {
    bounded(r, &s->samples[i], -most_size, most_size);
    amount(r, &s->seconds[i]);
    bool rising = i == 0 || (s->samples[i] >= s->samples[i - 1] && s->seconds[i] >= s->seconds[i - 1]);
    r->sound = r->sound && rising;
  }
  amount(r, &s->slope);
}

static void model(record *r, even_rank_model *m) {
  count(r, &m->count, 0, EVEN_MODEL_WINDOW);
  count(r, &m->block, 1, MOST_BLOCK);
  count(r, &m->pending, 0, MOST_BLOCK - 1); /* `block` may be less by now than when these began */
  amount(r, &m->pending_samples);
  amount(r, &m->pending_seconds);
  amount(r, &m->pending_pieces);
  amounts(r, m->samples, (size_t)m->count);
  amounts(r, m->seconds, (size_t)m->count);
  amounts(r, m->pieces, (size_t)m->count);
  whole(r, &m->micro_batch, 0, INT64_MAX);
  amount(r, &m->piece_samples);
  flag(r, &m->known);
  amount(r, &m->fixed_seconds);
  amount(r, &m->seconds_per_sample);
  amount(r, &m->fixed_samples);
  amount(r, &m->noise);
  amount(r, &m->usual_noise);
  flag(r, &m->sped_up);
  number(r, &m->drift);
  amount(r, &m->restless);
  amount(r, &m->most_samples);
  amount(r, &m->known_samples);
  amount(r, &m->known_seconds);
  flag(r, &m->dummy);
  flag(r, &m->guess);
  count(r, &m->idle_count, 0, EVEN_MODEL_IDLE);
  count(r, &m->idle_next, 0, EVEN_MODEL_IDLE - 1);
  count(r, &m->idle_since, 0, EVEN_MODEL_IDLE);
  amounts(r, m->idle, (size_t)m->idle_count);
  amount(r, &m->idle_reference);
  shape(r, &m->shape);
}

static void series(record *r, even_series *s) {
  count(r, &s->taken, 0, MOST_TAKEN);
  amounts(r, s->seconds, (size_t)even_series_count(s));
}

static void trial(record *r, even_trial *t) {
  int state = (int)t->state;
  count(r, &state, EVEN_TRIAL_IDLE, EVEN_TRIAL_CHECKED);
  t->state = (even_trial_state)state;
  series(r, &t->before);
  series(r, &t->challenger);
  series(r, &t->after);
  count(r, &t->missed, 0, MOST_TAKEN);
  count(r, &t->settling, 0, MOST_TAKEN);
  number(r, &t->lost);
  amount(r, &t->margin);
}

static void fixed_name(record *r, even_fixed_name *name, int least) {
  int value = (int)*name;
  count(r, &value, least, EVEN_FIXED_COUNT - 1);
  *name = (even_fixed_name)value;
}

static void stops(record *r, even_stops *s) {
  count(r, &s->steps, 0, MOST_TAKEN);
  amounts(r, s->busy, s->ranks);
  for (size_t rank = 0; rank < s->ranks; rank++) {
    bounded(r, &s->least[rank], 0.0, INFINITY);
    count(r, &s->times[rank], 0, MOST_TAKEN);
  }
}

static void guard(record *r, even_guard *g) {
  int question = (int)g->question;
  amounts(r, g->floors, g->ranks);
  amounts(r, g->floors_tried, g->ranks);
  for (size_t rank = 0; rank < g->ranks; rank++) {
    flag(r, &g->met[rank]);
  }
  amounts(r, g->blame, g->ranks);
  amount(r, &g->blame_weight);
  amounts(r, g->busy, g->ranks);
  number(r, &g->busy_of);
  amounts(r, g->scatter, g->ranks);
  amounts(r, g->bursts, g->ranks);
  number(r, &g->recent);
  counts(r, g->watched, g->ranks, 0);
  counts(r, g->challenger, g->ranks, 0);
  for (int name = 0; name < EVEN_FIXED_COUNT; name++) { /* their shares follow from the caps */
    even_fixed *fixed = &g->fixed[name];
    amount(r, &fixed->first_seconds);
    count(r, &fixed->first_steps, 0, MOST_TAKEN);
    amount(r, &fixed->seconds);
    amount(r, &fixed->balanced_seconds);
  }
  fixed_name(r, &g->in_force, EVEN_FIXED_NONE);
  fixed_name(r, &g->compared, 0);
  fixed_name(r, &g->doubted, EVEN_FIXED_NONE);
  amount(r, &g->against);
  trial(r, &g->trial);
  stops(r, &g->stops);
  count(r, &question, 0, EVEN_GUARD_QUESTIONS - 1);
  g->question = (even_guard_question)question;
  flag(r, &g->alone);
  amount(r, &g->released);
  for (int i = 0; i < EVEN_GUARD_QUESTIONS; i++) {
    whole(r, &g->next[i], 0, most_wait);
    whole(r, &g->pause[i], 1, longest_pause);
  }
}

static void replay(record *r, even_replay *p, size_t ranks) {
  whole(r, &p->taken, 0, most_steps);
  if (p->seconds != NULL) {
    size_t many = kept(p->taken, EVEN_REPLAY_STEPS) * ranks;
    amounts(r, p->samples, many);
    amounts(r, p->seconds, many);
  }
}

static void level(record *r, even_level *l, size_t ranks) {
  size_t many = ranks < EVEN_REPLAY_RANKS ? ranks : EVEN_REPLAY_RANKS;
  counts(r, l->shares, many, 0);
  whole(r, &l->since, 0, most_steps);
  number(r, &l->usual);
  number(r, &l->recent);
  amount(r, &l->own);
  whole(r, &l->known, 0, most_steps);
  for (size_t rank = 0; rank < many; rank++) {
    number(r, &l->off[rank]);
  }
  number(r, &l->common);
  count(r, &l->moves, 0, MOST_TAKEN);
}

static void change(record *r, even_change *c) {
  count(r, &c->count, 0, MOST_TAKEN);
  amounts(r, c->excess, kept(c->count, EVEN_CHANGES_KEPT));
  amount(r, &c->usual);
  count(r, &c->usual_steps, 0, MOST_TAKEN);
  whole(r, &c->last, 0, most_steps);
}

static void exchange(record *r, even_exchange *e) {
  whole(r, &e->taken, 0, most_steps);
  whole(r, &e->told, 0, e->taken);
  size_t steps = kept(e->taken, EVEN_EXCHANGE_STEPS);
  amounts(r, e->seconds, steps * e->ranks);
  amounts(r, e->longest, steps);
  amounts(r, e->counted, e->ranks);
}

static void meetings(record *r, even_meetings *m, size_t ranks) {
  int64_t turn = (int64_t)m->turn;
  amount(r, &m->longest);
  amount(r, &m->waits);
  amount(r, &m->waited);
  whole(r, &m->alone, 0, most_steps);
  whole(r, &turn, 0, (int64_t)(EVEN_MEETINGS_KINDS * ranks) - 1);
  m->turn = (size_t)turn;
  flag(r, &m->round);
}

/* What must be the balancer's own: a state of other ranks is none of it. Whether that is so. */
static bool head(record *r, const even_balancer *b) {
  int64_t policy = (int64_t)b->policy;
  int64_t ranks = (int64_t)b->ranks;
  int64_t batch = b->batch;
  whole(r, &policy, INT64_MIN, INT64_MAX);
  whole(r, &ranks, INT64_MIN, INT64_MAX);
  whole(r, &batch, INT64_MIN, INT64_MAX);
  bool same = policy == (int64_t)b->policy && ranks == (int64_t)b->ranks && batch == b->batch;
  for (size_t rank = 0; same && rank < b->ranks; rank++) {
    int64_t bucket = b->models[rank].bucket;
    whole(r, &bucket, INT64_MIN, INT64_MAX);
    same = bucket == b->models[rank].bucket;
  }
  return same;
}

static void parts(record *r, even_balancer *b) {
  int64_t probed = (int64_t)b->probed;
  for (size_t rank = 0; rank < b->ranks; rank++) {
    bounded(r, &b->speeds[rank], 0x1p-40, 1.0);
    model(r, &b->models[rank]);
  }
  counts(r, b->caps, b->ranks, INT64_MIN);
  counts(r, b->current, b->ranks, 0);
  guard(r, &b->guard);
  amount(r, &b->scatter.square);
  count(r, &b->scatter.steps, 0, MOST_TAKEN);
  amounts(r, b->scatters, b->ranks);
  whole(r, &b->scatters_at, -1, most_steps);
  replay(r, &b->replay, b->ranks);
  level(r, &b->level, b->ranks);
  change(r, &b->change);
  exchange(r, &b->exchange);
  meetings(r, &b->meetings, b->ranks);
  timings(r, b->last, b->ranks);
  whole(r, &b->steps, 0, most_steps);
  whole(r, &b->next_probe, 0, most_wait);
  whole(r, &b->probe_left, 0, EVEN_LEAST_STEPS);
  whole(r, &probed, 0, (int64_t)b->ranks - 1);
  b->probed = (size_t)probed;
}

size_t even_balancer_save(even_balancer *b, void *bytes, size_t capacity) {
  record r = {.out = bytes, .size = bytes != NULL ? capacity : 0, .sound = true};
  uint64_t own = magic;
  int64_t version = VERSION;
  word(&r, &own);
  whole(&r, &version, VERSION, VERSION);
  (void)head(&r, b);
  parts(&r, b);
  return r.at;
}

/* Whether these, none below zero, are a split of the batch. */
static bool is_split(const even_balancer *b, const int64_t *shares) {
  int64_t left = b->batch;
  for (size_t rank = 0; rank < b->ranks; rank++) {
    if (shares[rank] > left) {
      return false;
    }
    left -= shares[rank];
  }
  return left == 0;
}

static bool within_caps(const even_balancer *b, const int64_t *shares) {
  for (size_t rank = 0; rank < b->ranks; rank++) {
    if (b->caps[rank] >= 0 && shares[rank] > b->caps[rank]) {
      return false;
    }
  }
  return true;
}

/* Of a policy of the caller's these are what last ran, maybe drawn before a cap fell. */
static bool may_run(const even_balancer *b) {
  return is_split(b, b->current) && (b->policy == EVEN_POLICY_CALLBACK || within_caps(b, b->current));
}

static even_status damaged(void) {
  return even_fail(EVEN_ERR_CORRUPT, "balancer: what was saved of one is damaged");
}

/* Into a balancer that has learned nothing. */
static even_status read_parts(record *r, even_balancer *fresh) {
  parts(r, fresh);
  bool tried = fresh->guard.trial.state != EVEN_TRIAL_IDLE;
  const int64_t *challenger = fresh->guard.challenger;
  if (!r->sound || r->at != r->size || !may_run(fresh) ||
      (tried && !(is_split(fresh, challenger) && within_caps(fresh, challenger)))) {
    return damaged();
  }
  even_status status = even_fixed_split(fresh);
  return status == EVEN_ERR_ARGUMENT ? damaged() : status; /* caps that never held the batch */
}

static even_status open_alike(const even_balancer *b, even_balancer **out) {
  const even_balancer_params params = {.size = sizeof params,
                                       .policy = b->policy,
                                       .ranks = b->ranks,
                                       .batch = b->batch,
                                       .speeds = b->speeds,
                                       .caps = b->caps,
                                       .choose = b->choose,
                                       .choose_context = b->choose_context};
  EVEN_TRY(even_balancer_open(&params, out));
  for (size_t rank = 0; rank < b->ranks; rank++) {
    (*out)->models[rank].bucket = (*out)->costs[rank].bucket = b->models[rank].bucket;
  }
  return EVEN_OK;
}

/* The caps of now are the caller's, those that were saved may be other ones. */
static even_status take_caps(even_balancer *fresh, const even_balancer *b) {
  if (memcmp(fresh->caps, b->caps, b->ranks * sizeof *b->caps) == 0) {
    return EVEN_OK;
  }
  return even_balancer_set_caps(fresh, b->caps);
}

even_status even_balancer_restore(even_balancer *b, const void *bytes, size_t size) {
  record r = {.in = bytes, .size = bytes != NULL ? size : 0, .sound = true};
  uint64_t own = 0;
  int64_t version = 0;
  even_balancer *fresh = NULL;
  if (bytes == NULL) {
    return damaged();
  }
  word(&r, &own);
  whole(&r, &version, INT64_MIN, INT64_MAX);
  if (!r.sound || own != magic) {
    return damaged();
  }
  if (version != VERSION) {
    return even_fail(EVEN_ERR_UNSUPPORTED,
                     "balancer: what was saved of one is of version %" PRId64 ", and this build knows %d", version,
                     VERSION);
  }
  if (!head(&r, b)) {
    return even_fail(EVEN_ERR_ARGUMENT, "balancer: what was saved is of another policy, other ranks or another batch");
  }
  EVEN_TRY(open_alike(b, &fresh));
  even_status status = read_parts(&r, fresh);
  if (status == EVEN_OK) {
    status = take_caps(fresh, b);
  }
  if (status == EVEN_OK) {
    even_balancer before = *b;
    *b = *fresh;
    *fresh = before;
  }
  even_balancer_close(fresh);
  return status;
}
