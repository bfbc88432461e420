/* From the rings to the decision, and from the decision to words, stacks and the end. */
#include "orchestrator/hangs.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/last_call.h"
#include "orchestrator/openings.h"
#include "orchestrator/silence.h"
#include "orchestrator/waiting.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/process.h"
#include "os/process_threads.h"
#include "telemetry/stacks.h"

#include <stdio.h>
#include <string.h>

/* On a terminal: so many lines, of so many ranks at most; files hold all. */
enum { SHOWN_LINES = 60, SHOWN_LINE = 200, SHOWN_RANKS = 4 };

/* Between two ticks; what is beyond is time in which this process, and so perhaps all others, could not run. */
static const uint64_t held_up_ns = 1000000000u;
static const uint64_t answer_ns = 5000000000u;
/* Where all ranks of all hosts wait for one another, so long for the stacks of the others. */
static const uint64_t others_ns = 7000000000u;
/* A rank that uses so much of a core, its children included, is at work in what nothing is known of. */
static const double AT_WORK = 0.05;
/* So is one that reads or writes so much a second: slow storage gives little, and takes no CPU time. */
static const double AT_WORK_BYTES = 1024;

typedef struct rank_watch {
  even_silence silence;
  uint64_t work_at_ns; /* when what it had done was looked at; 0: not in this silence */
  even_process_work work;
  int64_t openings; /* how often it came to torch's init_process_group, and out of it */
  bool waits;       /* it is late in a collective, as are all of this host, until it goes on */
  bool told;
  bool asked;
  uint64_t asked_ns;
  even_stacks_request stacks;
  char words[160];
  even_last_call last; /* its collective when it was told */
} rank_watch;

struct even_hangs {
  even_telemetry_reader *reader;
  rank_watch *ranks;
  even_silence_rank *facts;
  bool *hung;
  size_t count;
  uint64_t least_ns;
  uint64_t last_ns; /* of the tick before */
  bool spoke;       /* a rank said what it is at: only then it is known that the script uses evenstep */
  size_t opening;   /* ranks that waited in torch's init_process_group */
  bool all_wait;    /* this host's ranks, in collectives, for too long, */
  bool everywhere;  /* and those of all other hosts, too */
  uint64_t ends_ns; /* since when ranks shall be ended for it; 0: none shall */
  int shown;        /* ranks whose stacks were, in this attempt */
  bool restart;
};

static const char *const activity_names[EVEN_ACTIVITY_COUNT] = {
#define ACTIVITY_NAME(name, number, text) [number] = text,
    EVEN_ACTIVITY_LIST(ACTIVITY_NAME)
#undef ACTIVITY_NAME
};

static even_status open_all(const even_job *job, even_hangs *hangs) {
  EVEN_TRY(even_telemetry_reader_open(job->params->telemetry_fd, &hangs->reader));
  EVEN_TRY(EVEN_NEW_ARRAY(&hangs->ranks, hangs->count));
  EVEN_TRY(EVEN_NEW_ARRAY(&hangs->facts, hangs->count));
  return EVEN_NEW_ARRAY(&hangs->hung, hangs->count);
}

even_status even_hangs_open(const even_job *job, even_hangs **out) {
  even_hangs *hangs = NULL;
  *out = NULL;
  if (!(job->params->hang_seconds > 0) || job->params->telemetry_fd < 0) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW(&hangs));
  hangs->count = job->count;
  hangs->least_ns = (uint64_t)(job->params->hang_seconds * 1e9);
  hangs->restart = job->params->restart_hung;
  even_status status = open_all(job, hangs);
  if (status != EVEN_OK) {
    even_hangs_close(hangs);
    return status;
  }
  *out = hangs;
  return EVEN_OK;
}

void even_hangs_close(even_hangs *hangs) {
  if (hangs == NULL) {
    return;
  }
  for (size_t i = 0; hangs->ranks != NULL && i < hangs->count; i++) {
    even_text rest = EVEN_TEXT_EMPTY;
    even_stacks_take(&hangs->ranks[i].stacks, &rest);
    even_text_free(&rest);
  }
  even_telemetry_reader_close(hangs->reader);
  even_free(hangs->ranks);
  even_free(hangs->facts);
  even_free(hangs->hung);
  even_free(hangs);
}

static void read_ring(const even_hangs *hangs, size_t rank, even_rank_activity *activity, uint64_t *calls) {
  even_call_totals totals;
  even_telemetry_reader_activity(hangs->reader, (int)rank, activity);
  even_telemetry_reader_totals(hangs->reader, (int)rank, &totals);
  *calls = totals.collectives + totals.messages;
}

void even_hangs_begin_rank(even_hangs *hangs, size_t rank) {
  even_text rest = EVEN_TEXT_EMPTY;
  even_rank_activity activity;
  uint64_t calls = 0;
  if (hangs == NULL) {
    return;
  }
  even_stacks_take(&hangs->ranks[rank].stacks, &rest);
  even_text_free(&rest);
  memset(&hangs->ranks[rank], 0, sizeof hangs->ranks[rank]);
  read_ring(hangs, rank, &activity, &calls);
  even_silence_begin(&hangs->ranks[rank].silence, &activity, calls, even_clock_ns());
}

void even_hangs_begin(even_hangs *hangs) {
  if (hangs == NULL) {
    return;
  }
  hangs->last_ns = even_clock_ns();
  hangs->shown = 0;
  hangs->opening = 0;
  hangs->ends_ns = 0;
  for (size_t i = 0; i < hangs->count; i++) {
    even_hangs_begin_rank(hangs, i);
  }
}

void even_hangs_output(even_hangs *hangs, int rank) {
  if (hangs != NULL) {
    even_silence_sign(&hangs->ranks[rank].silence, even_clock_ns());
  }
}

const char *even_hangs_words(const even_hangs *hangs, size_t rank) {
  return hangs == NULL ? "" : hangs->ranks[rank].words;
}

/* ---- who is late ---- */

static double silent_seconds(const rank_watch *watch, uint64_t now_ns) {
  return (double)(now_ns - watch->silence.quiet_ns) * 1e-9;
}

/* Less than before: a process of its has ended that nobody waited for, and what that did went with it. */
static bool was_at_work(const rank_watch *watch, pid_t pid, uint64_t now_ns) {
  const even_process_work now = even_process_session_work(pid);
  if (now.moved_bytes < watch->work.moved_bytes) {
    return true;
  }
  double seconds = (double)(now_ns - watch->work_at_ns) * 1e-9;
  return now.cpu_seconds - watch->work.cpu_seconds >= AT_WORK * seconds ||
         now.moved_bytes - watch->work.moved_bytes >= AT_WORK_BYTES * seconds;
}

/* Where nothing is known of how long a rank takes for what it is at, it hangs only if it also does nothing: what it has
 * done is looked at after half its limit, and again at the end; one that was at work gets half a limit more. */
static bool is_late(rank_watch *watch, pid_t pid, uint64_t least_ns, uint64_t now_ns) {
  uint64_t silent_ns = now_ns - watch->silence.quiet_ns;
  uint64_t limit_ns = even_silence_limit_ns(&watch->silence, least_ns);
  if (even_silence_known(&watch->silence)) {
    return silent_ns > limit_ns;
  }
  if (watch->work_at_ns == 0 && silent_ns > limit_ns / 2) {
    watch->work_at_ns = now_ns;
    watch->work = even_process_session_work(pid);
  }
  if (watch->told || watch->waits) {
    return true;
  }
  if (silent_ns <= limit_ns || watch->work_at_ns == 0 || now_ns - watch->work_at_ns < limit_ns / 2) {
    return false;
  }
  bool at_work = was_at_work(watch, pid, now_ns);
  watch->work_at_ns = at_work ? 0 : watch->work_at_ns;
  return !at_work;
}

/* Also in collectives that the script calls itself, in whatever it is at. */
static bool waits_in_a_collective(const rank_watch *watch, pid_t pid) {
  even_last_call last;
  if (watch->silence.activity == EVEN_ACTIVITY_COLLECTIVE) {
    return true;
  }
  even_last_call_read(pid, &last);
  return last.waits;
}

/* ---- telling ---- */

static void describe_activity(const rank_watch *watch, char *text, size_t bytes) {
  const char *name = activity_names[watch->silence.activity];
  (void)snprintf(text, bytes, watch->silence.stepped ? "%s" : "start (%s)", name);
}

/* To whoever keeps the history. */
static void observe(const even_job *job, size_t rank, bool over, const char *words) {
  if (job->params->observer.hang != NULL) {
    job->params->observer.hang(job->params->observer.context, (int)rank, over, words);
  }
}

static void say_that_it_goes_on(rank_watch *watch, even_job *job, size_t rank) {
  even_text rest = EVEN_TEXT_EMPTY;
  char words[80];
  (void)snprintf(words, sizeof words, "rank %zu goes on: it was slow, and did not hang", rank);
  even_job_notice(job, "%s", words);
  observe(job, rank, true, words);
  job->ranks[rank].hung = false;
  watch->told = false;
  watch->asked = false;
  watch->words[0] = '\0';
  even_stacks_take(&watch->stacks, &rest);
  even_text_free(&rest);
}

/* Without its middle where there is no room for all of it: its end says where that is. */
static void add_ends(char *text, size_t bytes, const char *words) {
  static const char cut[] = " ... ";
  size_t at = strlen(text);
  size_t room = bytes - at;
  size_t length = strlen(words);
  size_t head = room > sizeof cut ? (room - sizeof cut) / 2 : 0;
  bool whole = length < room || head == 0;
  (void)snprintf(text + at, room, "%.*s%s%s", (int)(whole ? length : head), words, whole ? "" : cut,
                 whole ? "" : words + length - head);
}

static void tell(even_hangs *hangs, even_job *job, size_t rank, size_t waiting, uint64_t now_ns) {
  rank_watch *watch = &hangs->ranks[rank];
  char activity[64];
  char others[64] = "";
  char limit[96];
  char call[EVEN_FLIGHT_CALL_BYTES + EVEN_FLIGHT_SITE_BYTES + 64] = "";
  double limit_seconds = (double)even_silence_limit_ns(&watch->silence, hangs->least_ns) * 1e-9;
  describe_activity(watch, activity, sizeof activity);
  if (even_silence_known(&watch->silence)) {
    (void)snprintf(limit, sizeof limit, "limit %.3g s; p99 here %.2g s", limit_seconds,
                   even_silence_p99(&watch->silence));
  } else {
    (void)snprintf(limit, sizeof limit, "limit %.3g s, as nothing is known of how long this takes", limit_seconds);
  }
  bool opening = even_job_opening_misses(job, rank);
  if (opening && job->openings.waiting > waiting) { /* also ranks of other hosts */
    waiting = job->openings.waiting;
  }
  if (waiting > 0) {
    (void)snprintf(others, sizeof others, "; %zu rank%s for it%s", waiting, waiting == 1 ? " waits" : "s wait",
                   opening ? " in init_process_group" : "");
  }
  if (hangs->everywhere) {
    (void)snprintf(others, sizeof others, "; all ranks of all hosts wait in collectives");
  }
  even_last_call_read(job->ranks[rank].pid, &watch->last);
  if (watch->last.waits) {
    even_last_call_describe(&watch->last, call, sizeof call);
  }
  const char *in = call[0] == '\0' ? "" : "; in ";
  watch->told = true;
  (void)snprintf(watch->words, sizeof watch->words, "no progress for %.3g s in %s", silent_seconds(watch, now_ns),
                 activity);
  char words[EVEN_JOB_NOTICE];
  (void)snprintf(words, sizeof words, "rank %zu (%s, process %ld) hangs: %s (%s)%s%s", rank,
                 job->params->devices->items[rank].name, (long)job->ranks[rank].pid, watch->words, limit, others, in);
  add_ends(words, sizeof words, call);
  even_job_notice(job, "%s", words);
  (void)snprintf(words, sizeof words, "rank %zu hangs: %s%s%s", rank, watch->words, others, in);
  add_ends(words, sizeof words, call);
  observe(job, rank, false, words);
  watch->asked = true;
  watch->asked_ns = now_ns;
  if (even_stacks_ask(job->ranks[rank].pid, &watch->stacks) != EVEN_OK) {
    watch->asked_ns = 0; /* nobody answers */
    even_error_clear();
  }
}

/* The first lines of it, as notices: up to the C stack of the second thread. */
static void show(even_job *job, const char *text) {
  size_t shown = 0;
  size_t threads = 0;
  while (*text != '\0' && shown < SHOWN_LINES) {
    size_t length = strcspn(text, "\n");
    threads += strncmp(text, "thread ", 7) == 0 ? 1 : 0;
    if (threads == 2) {
      return;
    }
    if (length > 0) {
      even_job_notice(job, "  | %.*s", (int)(length < SHOWN_LINE ? length : SHOWN_LINE), text);
      shown++;
    }
    text += length + (text[length] == '\n' ? 1 : 0);
  }
}

/* By its group's flight record: where none was kept (torch's own groups), nothing is said. */
static void add_last_call(const rank_watch *watch, even_text *out) {
  char call[EVEN_FLIGHT_CALL_BYTES + EVEN_FLIGHT_SITE_BYTES + 64];
  even_last_call_describe(&watch->last, call, sizeof call);
  if (watch->last.known) {
    even_text_format(out, "%s: %s\nWhat the ranks of that group reached (its own numbers): %s\n\n",
                     watch->last.waits                              ? "It waits in a collective"
                     : watch->last.call.state == EVEN_FLIGHT_FAILED ? "Its last collective, which failed"
                                                                    : "Its last collective, which is done",
                     call, watch->last.reached);
  }
}

static void write_stacks(even_hangs *hangs, even_job *job, size_t rank) {
  rank_watch *watch = &hangs->ranks[rank];
  even_text text = EVEN_TEXT_EMPTY;
  even_text path = EVEN_TEXT_EMPTY;
  bool told = even_stacks_told(&watch->stacks);
  even_text_format(&text, "rank %zu (process %ld), attempt %d: %s\n\n", rank, (long)job->ranks[rank].pid, job->attempt,
                   watch->words);
  add_last_call(watch, &text);
  size_t head = text.length;
  even_stacks_take(&watch->stacks, &text);
  if (!told) {
    even_text_add(&text, watch->asked_ns == 0 ? "It has not imported evenstep, so its own stacks are not known.\n"
                                              : "It did not answer, so its own stacks are not known.\n");
  }
  even_text_add(&text, "\nThreads, as the kernel sees them:\n");
  even_process_threads_describe(job->ranks[rank].pid, &text);
  even_text_format(&path, "%s/logs/hang-rank-%zu.txt", job->run_folder.data, rank);
  even_status status = even_text_status(&text);
  status = status == EVEN_OK ? even_text_status(&path) : status;
  status = status == EVEN_OK ? even_file_replace(path.data, text.data, text.length) : status;
  if (status == EVEN_OK) {
    even_job_notice(job, "stacks of rank %zu (all of them in logs/hang-rank-%zu.txt)%s", rank, rank,
                    hangs->shown < SHOWN_RANKS ? ":" : "");
  } else {
    even_job_notice(job, "the stacks of rank %zu cannot be written: %s", rank, even_error_last()->what);
    even_error_clear();
  }
  if (hangs->shown++ < SHOWN_RANKS) {
    show(job, text.length > head ? text.data + head : "");
  }
  even_text_free(&text);
  even_text_free(&path);
  watch->asked = false;
}

/* ---- the tick ---- */

/* On its way to a place: no member misses it, and none waits for it. */
static bool arrives(const even_job *job, size_t rank) {
  return job->ranks[rank].alive && even_job_is_outside(job, rank) && !even_job_offers(job, rank);
}

/* Time that did not pass for a rank: nothing could run, or it stands between two steps, until all do. */
static void pass_over(rank_watch *watch, uint64_t ns, uint64_t now_ns) {
  uint64_t silent_ns = now_ns - watch->silence.quiet_ns;
  ns = ns < silent_ns ? ns : silent_ns;
  even_silence_shift(&watch->silence, ns);
  watch->work_at_ns += watch->work_at_ns == 0 ? 0 : ns;
}

/* It has come to torch's init_process_group, or out of it. */
static bool went_on(rank_watch *watch, const even_rank_progress *its, uint64_t now_ns) {
  int64_t openings = its->opening + its->opened;
  bool went = openings != watch->openings;
  watch->openings = openings;
  if (went) {
    even_silence_sign(&watch->silence, now_ns);
  }
  return went;
}

static void look(even_hangs *hangs, even_job *job, uint64_t now_ns) {
  uint64_t passed_ns = now_ns - hangs->last_ns;
  bool held_up = passed_ns > held_up_ns;
  hangs->spoke = false;
  for (size_t i = 0; i < hangs->count; i++) {
    rank_watch *watch = &hangs->ranks[i];
    even_rank_activity activity;
    uint64_t calls = 0;
    pass_over(watch, held_up || even_job_stands(job, i) ? passed_ns : 0, now_ns);
    read_ring(hangs, i, &activity, &calls);
    bool came = went_on(watch, &job->progress.ranks[i], now_ns);
    if (even_silence_look(&watch->silence, &activity, calls, now_ns) || came || even_job_offers(job, i)) {
      watch->work_at_ns = 0;
      watch->waits = false;
      if (watch->told) {
        say_that_it_goes_on(watch, job, i);
      }
    }
    hangs->spoke = hangs->spoke || watch->silence.spoke;
  }
  hangs->last_ns = now_ns;
}

/* Whether something is known of ranks that wait for one another: before, all may be about something of the script's. */
static bool may_decide(const even_hangs *hangs, const even_job *job, size_t rank) {
  return hangs->spoke || even_job_opening_misses(job, rank) || even_job_opens(job, rank);
}

/* Nobody waits that is known of: silence counts from when somebody does. */
static void let_be(even_hangs *hangs, uint64_t now_ns) {
  for (size_t i = 0; i < hangs->count; i++) {
    even_silence_sign(&hangs->ranks[i].silence, now_ns);
    hangs->ranks[i].work_at_ns = 0;
  }
}

/* Another one has come: who waited for it, as for a download, begins only now with what is its own. */
static bool note_arrivals(even_hangs *hangs, const even_job *job) {
  bool came = job->openings.waiting > hangs->opening;
  for (size_t i = 0; came && i < hangs->count; i++) {
    hangs->ranks[i].waits = false;
    hangs->ranks[i].work_at_ns = 0;
  }
  hangs->opening = job->openings.waiting;
  return came;
}

/* Whether it is still about what comes before ranks meet. */
static bool is_on_its_way(const even_hangs *hangs, const even_job *job, size_t rank) {
  return hangs->facts[rank].alive && !job->ranks[rank].elsewhere && !hangs->ranks[rank].silence.spoke &&
         !even_job_opens(job, rank) && may_decide(hangs, job, rank);
}

/* One that does nothing may wait for another that has not come either: where one downloads, or prepares, for all of its
 * host. It is looked at again like one that was at work. Whether any is late all the same. */
static bool spare_who_waits_for_one_on_its_way(even_hangs *hangs, const even_job *job) {
  bool at_work = false;
  bool any_late = false;
  for (size_t i = 0; i < hangs->count; i++) {
    at_work = at_work || (!hangs->facts[i].late && is_on_its_way(hangs, job, i));
  }
  for (size_t i = 0; i < hangs->count; i++) {
    if (at_work && hangs->facts[i].late && !hangs->ranks[i].told && is_on_its_way(hangs, job, i)) {
      hangs->facts[i].late = false;
      hangs->ranks[i].work_at_ns = 0;
    }
    any_late = any_late || hangs->facts[i].late;
  }
  return any_late;
}

/* Of other hosts' ranks their agents know whether they are late: no host's ranks hang that wait for one elsewhere. */
static void look_elsewhere(even_hangs *hangs, const even_job *job, uint64_t now_ns) {
  size_t waiting = 0;
  hangs->all_wait = true;
  for (size_t i = 0; i < hangs->count; i++) {
    const even_silence_rank *fact = &hangs->facts[i];
    bool own = fact->alive && !job->ranks[i].elsewhere;
    bool waits = fact->late && fact->in_collective && !fact->held;
    hangs->all_wait = hangs->all_wait && (!own || waits);
    waiting += own && waits ? 1 : 0;
  }
  hangs->all_wait = hangs->all_wait && waiting > 0;
  for (size_t i = 0; hangs->all_wait && i < hangs->count; i++) {
    hangs->ranks[i].waits = hangs->facts[i].alive && !job->ranks[i].elsewhere;
  }
  bool all = hangs->all_wait && even_job_waiting_elsewhere(job, now_ns);
  hangs->everywhere = false;
  for (size_t i = 0; all && i < hangs->count; i++) {
    if (job->ranks[i].elsewhere) {
      hangs->facts[i] = (even_silence_rank){
          .alive = hangs->facts[i].alive && job->ranks[i].alive, .late = true, .in_collective = true};
      hangs->everywhere = true;
    }
  }
}

static size_t decide(even_hangs *hangs, even_job *job, uint64_t now_ns) {
  bool any_late = false;
  hangs->all_wait = false;
  for (size_t i = 0; i < hangs->count; i++) {
    rank_watch *watch = &hangs->ranks[i];
    even_silence_rank *fact = &hangs->facts[i];
    if (job->ranks[i].elsewhere) { /* its own agent looks; who waits in a collective may wait for it */
      *fact = (even_silence_rank){.alive = true, .in_collective = even_job_opens(job, i)};
      continue;
    }
    *fact = (even_silence_rank){.alive = job->ranks[i].alive && !even_job_is_outside(job, i)};
    fact->late = (fact->alive || arrives(job, i)) && may_decide(hangs, job, i) &&
                 is_late(watch, job->ranks[i].pid, hangs->least_ns, now_ns);
    any_late = any_late || fact->late;
  }
  if (!any_late) {
    return 0;
  }
  even_job_openings_look(job);
  if (note_arrivals(hangs, job) || !spare_who_waits_for_one_on_its_way(hangs, job)) {
    return 0;
  }
  for (size_t i = 0; i < hangs->count; i++) {
    even_silence_rank *fact = &hangs->facts[i];
    if (job->ranks[i].elsewhere) {
      continue;
    }
    fact->held = fact->alive && even_process_is_held(job->ranks[i].pid);
    fact->in_collective = fact->alive && (even_job_stands(job, i) || even_job_opens(job, i) ||
                                          waits_in_a_collective(&hangs->ranks[i], job->ranks[i].pid));
  }
  look_elsewhere(hangs, job, now_ns);
  size_t found = even_silence_decide(hangs->facts, hangs->count, hangs->hung);
  for (size_t i = 0; i < hangs->count; i++) {
    hangs->hung[i] = hangs->hung[i] && !job->ranks[i].elsewhere; /* its own agent tells of it */
    if (!job->ranks[i].elsewhere && hangs->facts[i].late && arrives(job, i) &&
        !even_process_is_held(job->ranks[i].pid)) {
      hangs->hung[i] = true;
      found++;
    }
  }
  return found;
}

/* Its hang is told. The others go on without one that has no place yet: it alone is ended, and another one started. */
static void act(even_hangs *hangs, even_job *job, size_t rank) {
  job->ranks[rank].hung = hangs->restart;
  if (!even_job_is_outside(job, rank)) {
    even_hangs_end(hangs);
  } else if (hangs->restart) {
    (void)even_process_signal_group(job->ranks[rank].pid, SIGKILL);
  }
}

void even_hangs_end(even_hangs *hangs) {
  hangs->ends_ns = hangs->ends_ns != 0 || !hangs->restart ? hangs->ends_ns : even_clock_ns();
}

/* Once the others have told of theirs, too, where all hang: their stacks go with them. */
static bool ends_now(even_hangs *hangs, const even_job *job, uint64_t now_ns) {
  bool any = false;
  bool all = true;
  for (size_t i = 0; i < hangs->count; i++) {
    bool takes_part = job->ranks[i].alive && !even_job_is_outside(job, i);
    any = any || (takes_part && job->ranks[i].hung);
    all = all && (!takes_part || job->ranks[i].hung);
  }
  hangs->ends_ns = any ? hangs->ends_ns : 0; /* those that went on do not hang */
  bool waits = job->follower == NULL && hangs->everywhere && !all && now_ns < hangs->ends_ns + others_ns;
  return hangs->ends_ns != 0 && !waits;
}

static size_t count_waiting(const even_hangs *hangs) {
  size_t waiting = 0;
  for (size_t i = 0; i < hangs->count; i++) {
    waiting += hangs->facts[i].alive && !hangs->hung[i] && hangs->facts[i].in_collective ? 1 : 0;
  }
  return waiting;
}

void even_hangs_tick(even_hangs *hangs, even_job *job, bool *end) {
  *end = false;
  if (hangs == NULL) {
    return;
  }
  uint64_t now_ns = even_clock_ns();
  look(hangs, job, now_ns);
  if (!hangs->spoke) {
    even_job_openings_look(job);
    (void)note_arrivals(hangs, job);
  }
  if (!hangs->spoke && job->openings.time == 0) {
    let_be(hangs, now_ns);
    return;
  }
  size_t found = decide(hangs, job, now_ns);
  even_job_waiting_say(job, hangs->all_wait, now_ns);
  if (found > 0) {
    size_t waiting = count_waiting(hangs);
    for (size_t i = 0; i < hangs->count; i++) {
      if (hangs->hung[i] && !hangs->ranks[i].told) {
        tell(hangs, job, i, waiting, now_ns);
      }
    }
  }
  for (size_t i = 0; i < hangs->count; i++) {
    rank_watch *watch = &hangs->ranks[i];
    if (watch->asked && job->ranks[i].alive &&
        (watch->asked_ns == 0 || even_stacks_told(&watch->stacks) || now_ns - watch->asked_ns > answer_ns)) {
      write_stacks(hangs, job, i);
      act(hangs, job, i);
    }
  }
  *end = ends_now(hangs, job, now_ns);
  hangs->ends_ns = *end ? 0 : hangs->ends_ns;
}
