/* The lives of the ranks' processes (events), and the steps that each of them made. */
#include "monitor/survival.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "monitor/sqlite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One process in a rank's place. */
typedef struct life {
  int attempt;
  int rank;
  pid_t pid;
  uint64_t began_ns;
  uint64_t ended_ns; /* 0: it was not told */
  uint64_t first_ns; /* the end of its first step, 0: it made none; */
  uint64_t last_ns;  /* of its last */
  int64_t first_step;
  int64_t last_step;
} life;

typedef struct step {
  size_t life;
  uint64_t end_ns;
} step;

/* A generation without ranks (`attempt` of it), or an attempt's beginning. */
typedef struct turn {
  int attempt;
  uint64_t at_ns;
  char without[EVEN_EVENT_WORDS_BYTES]; /* whom, as its event says */
} turn;

typedef struct lives {
  life *items;
  size_t count;
  step *steps;
  size_t step_count;
  turn *losses;
  size_t loss_count;
  turn *attempts;
  size_t attempt_count;
} lives;

/* Room for one more: capacities are powers of two. */
static even_status grow(void **items, size_t count, size_t bytes) {
  return (count & (count - 1)) != 0 ? EVEN_OK : even_realloc(items, count == 0 ? 1 : 2 * count, bytes);
}

static even_status add_turn(turn **turns, size_t *count, int attempt, uint64_t at_ns, const char *without) {
  EVEN_TRY(grow((void **)turns, *count, sizeof **turns));
  turn *made = &(*turns)[(*count)++];
  *made = (turn){.attempt = attempt, .at_ns = at_ns};
  (void)snprintf(made->without, sizeof made->without, "%s", without);
  return EVEN_OK;
}

/* "rank 1", "ranks 0, 1 and 4", "host there (ranks 2 and 3)", and more words behind. Where these are cut off, any. */
static bool names_rank(const char *without, int rank) {
  const char *at = NULL;
  for (const char *next = strstr(without, "rank"); next != NULL; next = strstr(next + 4, "rank")) {
    at = next; /* a host's name may have the word, too */
  }
  at = at == NULL ? "" : at + strcspn(at, " ");
  while (*at != '\0') {
    char *end = NULL;
    at += at[0] == ',' ? 1 : 0;
    at += strncmp(at, " and ", 5) == 0 ? 4 : 0;
    long named = at[0] == ' ' ? strtol(at + 1, &end, 10) : 0;
    if (end == NULL || end == at + 1) {
      return strstr(at, "…") != NULL;
    }
    if (named == rank) {
      return true;
    }
    at = end;
  }
  return false;
}

/* The newest process in the rank's place that had begun by then. */
static life *life_of(const lives *all, int attempt, int rank, uint64_t at_ns) {
  for (size_t i = all->count; i > 0; i--) {
    life *one = &all->items[i - 1];
    if (one->attempt == attempt && one->rank == rank && one->began_ns <= at_ns) {
      return one;
    }
  }
  return NULL;
}

static even_status take_event(lives *all, sqlite3_stmt *row) {
  int attempt = sqlite3_column_int(row, 0);
  uint64_t at = (uint64_t)sqlite3_column_int64(row, 1);
  int rank = sqlite3_column_int(row, 2);
  int event = even_state_event_number((const char *)sqlite3_column_text(row, 3));
  const char *words = (const char *)sqlite3_column_text(row, 5);
  const char *without = words == NULL ? NULL : strstr(words, " without ");
  if (event == EVEN_EVENT_RANK_STARTED) {
    EVEN_TRY(grow((void **)&all->items, all->count, sizeof *all->items));
    all->items[all->count++] = (life){
        .attempt = attempt, .rank = rank, .pid = (pid_t)sqlite3_column_int(row, 4), .began_ns = at, .last_step = -1};
  } else if (event == EVEN_EVENT_RANK_ENDED) {
    life *one = life_of(all, attempt, rank, at);
    if (one != NULL && one->ended_ns == 0) {
      one->ended_ns = at;
    }
  } else if (event == EVEN_EVENT_ATTEMPT) {
    return add_turn(&all->attempts, &all->attempt_count, attempt, at, "");
  } else if (event == EVEN_EVENT_GENERATION && without != NULL) {
    return add_turn(&all->losses, &all->loss_count, attempt, at, without);
  }
  return EVEN_OK;
}

static even_status take_step(lives *all, sqlite3_stmt *row, bool gaps, char wrong[EVEN_SURVIVAL_WORDS]) {
  int64_t last = sqlite3_column_int64(row, 2);
  int64_t first = last - sqlite3_column_int64(row, 3) + 1;
  uint64_t end = (uint64_t)sqlite3_column_int64(row, 4);
  int rank = sqlite3_column_int(row, 1);
  life *one = life_of(all, sqlite3_column_int(row, 0), rank, end);
  if (one == NULL) {
    return EVEN_OK;
  }
  if (one->first_ns != 0 && (first <= one->last_step || (!gaps && first > one->last_step + 1)) && wrong[0] == '\0') {
    (void)snprintf(wrong, EVEN_SURVIVAL_WORDS, "rank %d (process %ld) made step %lld after step %lld", rank,
                   (long)one->pid, (long long)first, (long long)one->last_step);
  }
  one->first_step = one->first_ns == 0 ? first : one->first_step;
  one->first_ns = one->first_ns == 0 ? end : one->first_ns;
  one->last_ns = end;
  one->last_step = last;
  EVEN_TRY(grow((void **)&all->steps, all->step_count, sizeof *all->steps));
  all->steps[all->step_count++] = (step){.life = (size_t)(one - all->items), .end_ns = end};
  return EVEN_OK;
}

static even_status read_all(even_history *history, lives *all, bool gaps, char wrong[EVEN_SURVIVAL_WORDS]) {
  static const char *const queries[] = {
      "SELECT attempt,at_ns,rank,event,value,words FROM events WHERE event IN"
      " ('rank_started','rank_ended','attempt','generation') ORDER BY rowid",
      "SELECT attempt,rank,step,steps,end_ns FROM steps ORDER BY rowid"};
  sqlite3 *connection = even_history_connection(history);
  even_status status = EVEN_OK;
  int code = sqlite3_exec(connection, "BEGIN", NULL, NULL, NULL);
  for (int i = 0; i < 2 && code == SQLITE_OK && status == EVEN_OK; i++) {
    sqlite3_stmt *row = NULL;
    code = sqlite3_prepare_v2(connection, queries[i], -1, &row, NULL);
    while (code == SQLITE_OK && status == EVEN_OK && (code = sqlite3_step(row)) == SQLITE_ROW) {
      code = SQLITE_OK;
      status = i == 0 ? take_event(all, row) : take_step(all, row, gaps, wrong);
    }
    code = code == SQLITE_DONE ? SQLITE_OK : code;
    (void)sqlite3_finalize(row);
  }
  if (code != SQLITE_OK && status == EVEN_OK) {
    status = even_sqlite_fail(connection, code, even_history_path(history), "cannot be read");
  }
  (void)sqlite3_exec(connection, "COMMIT", NULL, NULL, NULL);
  return status;
}

/* ---- one fault ---- */

static bool lived_at(const life *one, int attempt, uint64_t at_ns) {
  return one->attempt == attempt && one->began_ns <= at_ns && (one->ended_ns == 0 || one->ended_ns > at_ns);
}

static const life *victim_of(const lives *all, const even_survival *fault) {
  for (size_t i = all->count; i > 0; i--) {
    const life *one = &all->items[i - 1];
    if (one->pid == fault->pid && one->began_ns <= fault->at_ns) {
      return one;
    }
  }
  return NULL;
}

static uint64_t next_of(const turn *turns, size_t count, int attempt, uint64_t after_ns) {
  for (size_t i = 0; i < count; i++) {
    if (turns[i].attempt == attempt && turns[i].at_ns > after_ns) {
      return turns[i].at_ns;
    }
  }
  return 0;
}

/* The end of the process's first step after then; 0: it made none. */
static uint64_t step_after(const lives *all, size_t which, uint64_t at_ns) {
  for (size_t i = 0; all->items[which].last_ns > at_ns && i < all->step_count; i++) {
    if (all->steps[i].life == which && all->steps[i].end_ns > at_ns) {
      return all->steps[i].end_ns;
    }
  }
  return 0;
}

static bool is_hit(const life *one, const even_survival *faults, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (faults[i].pid == one->pid && faults[i].at_ns >= one->began_ns) {
      return true;
    }
  }
  return false;
}

/* Whether it is one of the others that trained when the fault came. */
static bool trained_beside(const life *one, const life *victim, uint64_t at_ns) {
  return one != victim && lived_at(one, victim->attempt, at_ns) && one->first_ns != 0 && one->first_ns <= at_ns;
}

/* When the others had agreed to go on without the fault's victim; 0: they never did, as where a stopped rank went on.
 * What comes after another fault of the same process is that one's. */
static uint64_t loss_by(const lives *all, const life *victim, const even_survival *faults, size_t count, size_t which) {
  const even_survival *fault = &faults[which];
  uint64_t lost = 0;
  for (size_t i = 0; i < all->loss_count && lost == 0; i++) {
    const turn *loss = &all->losses[i];
    bool its = loss->attempt == victim->attempt && loss->at_ns > fault->at_ns;
    lost = its && names_rank(loss->without, victim->rank) ? loss->at_ns : 0;
  }
  for (size_t i = 0; i < count; i++) {
    if (i != which && faults[i].pid == fault->pid && faults[i].at_ns > fault->at_ns && faults[i].at_ns < lost) {
      return 0;
    }
  }
  return lost;
}

static void find_one(const lives *all, even_survival *faults, size_t count, size_t which) {
  even_survival *fault = &faults[which];
  const life *victim = fault->pid > 0 ? victim_of(all, fault) : NULL;
  if (victim == NULL) {
    return;
  }
  uint64_t again = loss_by(all, victim, faults, count, which);
  uint64_t from = again != 0 ? again : fault->at_ns; /* the step under way may yet have ended without a loss */
  bool any = false;
  fault->trained = victim->first_ns != 0 && victim->first_ns <= fault->at_ns;
  for (size_t i = 0; i < all->count; i++) {
    if (trained_beside(&all->items[i], victim, fault->at_ns)) {
      uint64_t next = step_after(all, i, from);
      fault->others++;
      any = any || next != 0;
      fault->stepped_ns = next > fault->stepped_ns ? next : fault->stepped_ns;
    }
  }
  if (any) {
    fault->outcome = EVEN_SURVIVAL_WENT_ON;
    fault->again_ns = again;
  } else {
    fault->ended_ns = next_of(all->attempts, all->attempt_count, victim->attempt + 1, fault->at_ns);
    fault->outcome = fault->ended_ns != 0 ? EVEN_SURVIVAL_STARTED_AGAIN : EVEN_SURVIVAL_UNKNOWN;
  }
}

/* Whether it was not there when the attempt began: others had made the steps before its first one. */
static bool has_joined(const lives *all, const life *one) {
  for (size_t i = 0; i < all->count; i++) {
    const life *other = &all->items[i];
    if (other->attempt == one->attempt && other->first_ns != 0 && other->first_step < one->first_step) {
      return one->first_ns != 0;
    }
  }
  return false;
}

/* Processes that joined an attempt under way, the first of them to the first place that was empty. */
static void find_joiners(const lives *all, even_survival *faults, size_t count) {
  uint64_t last = 0;
  for (;;) {
    const life *next = NULL;
    for (size_t i = 0; i < all->count; i++) {
      const life *one = &all->items[i];
      if (one->first_ns > last && has_joined(all, one) && (next == NULL || one->first_ns < next->first_ns)) {
        next = one;
      }
    }
    if (next == NULL) {
      return;
    }
    last = next->first_ns;
    for (size_t i = 0; i < count; i++) {
      const life *victim = victim_of(all, &faults[i]);
      bool lost = faults[i].outcome == EVEN_SURVIVAL_WENT_ON && faults[i].trained && faults[i].again_ns != 0;
      if (lost && faults[i].joined_ns == 0 && victim->attempt == next->attempt && faults[i].at_ns < next->first_ns) {
        faults[i].joined_ns = next->first_ns;
        break;
      }
    }
  }
}

/* While others of its attempt went on, and nothing had been done to it. */
static void look_for_bystanders(const lives *all, const even_survival *faults, size_t count,
                                char wrong[EVEN_SURVIVAL_WORDS]) {
  for (size_t i = 0; i < all->count && wrong[0] == '\0'; i++) {
    const life *one = &all->items[i];
    const life *longer = NULL;
    for (size_t k = 0; k < all->count && one->ended_ns != 0 && one->first_ns != 0; k++) {
      const life *other = &all->items[k];
      if (k != i && other->attempt == one->attempt && other->last_ns > one->ended_ns) {
        longer = other;
      }
    }
    if (longer != NULL && !is_hit(one, faults, count)) {
      (void)snprintf(wrong, EVEN_SURVIVAL_WORDS,
                     "rank %d (process %ld) was lost, to which no fault had come, and rank %d went on", one->rank,
                     (long)one->pid, longer->rank);
    }
  }
}

even_status even_survival_find(even_history *history, even_survival *faults, size_t count, bool gaps,
                               char wrong[EVEN_SURVIVAL_WORDS]) {
  lives all = {NULL, 0, NULL, 0, NULL, 0, NULL, 0};
  wrong[0] = '\0';
  even_status status = read_all(history, &all, gaps, wrong);
  for (size_t i = 0; i < count && status == EVEN_OK; i++) {
    find_one(&all, faults, count, i);
  }
  if (status == EVEN_OK) {
    find_joiners(&all, faults, count);
    look_for_bystanders(&all, faults, count, wrong);
  }
  even_free(all.items);
  even_free(all.steps);
  even_free(all.losses);
  even_free(all.attempts);
  return status;
}
