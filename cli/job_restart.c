/* The process that the user, srun, mpirun or ssh has started keeps the terminal, its signals and the exit code, and
 * starts the agent, which may be killed (for lack of memory, say), as often as --max-restarts allows. Ranks outlast it
 * where they can (orchestrator/outlast.h): what they need for that this process keeps. Where they cannot, the job is
 * started again. */
#include "base/fail.h"
#include "cli/job.h"
#include "orchestrator/launched.h"
#include "orchestrator/outlast.h"
#include "orchestrator/pauses.h"
#include "os/clock.h"
#include "os/supervisor.h"
#include "os/sweep.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RESTARTS = 3, PAUSE_AGAIN_S = 600, PAUSE_AGAIN_LIVES_S = 60 };

/* The guardian kills for 5 s, and removes control groups; checkpoints in memory are removed for 10 s. */
static const uint64_t CLEAR_NS = 30000000000u;
static const uint64_t SECOND_NS = 1000000000u;

typedef struct supervised {
  even_supervisor supervisor;
  even_legacy legacy;
  const char *whose; /* agent it is */
  bool only_lives;   /* where its ranks end with it, whoever leads starts another one, */
  bool replaced;     /* or leads in its place, as long as another host votes */
  char *secret;      /* of the first agent alone; NULL: none */
  int most;
  int starts;    /* of an agent, without the first, */
  int since;     /* and how many of them before the training last came further */
  unsigned soon; /* of them, the last that ended early one after the other */
  int waits_s;   /* before the next */
  uint64_t started_ns;
} supervised;

/* In a rank of another job the variable is that job's. */
static const char *variable(void) {
  const char *value = getenv("EVENSTEP_RESTART_AGENT");
  return value == NULL || getenv("EVENSTEP_JOB") != NULL ? "" : value;
}

/* Whether another host takes this one's place when its agent is lost; */
static bool is_replaced(const even_job_options *options) {
  return options->hosts != NULL && even_job_replaces_leader(options);
}

/* also where its ranks could live on with another one here (outlast_hosts.c). */
static bool others_see_to_it(const even_job_options *options) {
  bool settled = strcmp(options->recovery, "restart") == 0 && options->max_ranks == 0 && options->witness == NULL;
  return is_replaced(options) && !settled;
}

static bool follows(const even_job_options *options) {
  return options->launched != NULL && options->launched->place > 0;
}

static bool others_see_to_one_without_ranks(const supervised *on) {
  return on->only_lives && !(on->replaced && even_legacy_is_alone(&on->legacy));
}

static int most_of(const supervised *on) {
  return others_see_to_one_without_ranks(on) ? MOST_RESTARTS : on->most;
}

/* The first at once: the ranks train meanwhile, and nobody sees to them. */
static void choose_pause(supervised *on, bool lives) {
  uint64_t again_s = lives ? PAUSE_AGAIN_LIVES_S : PAUSE_AGAIN_S;
  bool lasted = even_clock_ns() - on->started_ns > again_s * SECOND_NS;
  on->soon = lasted ? 1 : on->soon + 1;
  on->waits_s = even_pause_of_agent_s(on->soon, lives);
}

/* Whether another agent is to be started, and after which pause; `lives`: the job's ranks outlast this one. */
static bool may_again(supervised *on, const even_process_end *end, bool lives) {
  char how[64];
  char words[320];
  char when[32];
  char limit[48];
  int used = even_legacy_is_left(&on->legacy) && !lives ? even_legacy_restarts(&on->legacy) : 0;
  on->since = even_legacy_advanced(&on->legacy, lives) ? on->starts : on->since;
  used = used > on->starts - on->since ? used : on->starts - on->since;
  (void)snprintf(how, sizeof how, "%s%s", end->signal == 0 ? "could not go on with its ranks" : "was ended by ",
                 end->signal == 0 ? "" : even_signal_name(end->signal));
  if (used >= most_of(on)) {
    (void)snprintf(limit, sizeof limit,
                   others_see_to_one_without_ranks(on) ? "%d in a row at most" : "--max-restarts %d", most_of(on));
    (void)snprintf(words, sizeof words, "%s agent (process %ld) %s, and no restart is left (%s)", on->whose,
                   (long)end->pid, how, limit);
    even_cli_say(NULL, words);
    return false;
  }
  choose_pause(on, lives);
  (void)snprintf(when, sizeof when, on->waits_s == 0 ? "now" : "in %d s", on->waits_s);
  (void)snprintf(words, sizeof words, "%s agent (process %ld) %s: another one is started %s, %s", on->whose,
                 (long)end->pid, how, when, lives ? "and its ranks train on" : "once its ranks are gone");
  even_cli_say(NULL, words);
  return true;
}

/* What it had not written yet, the end in run.db say, is missing. */
static void say_over(const even_process_end *end) {
  char words[160];
  (void)snprintf(words, sizeof words, "the job's agent (process %ld) was ended by %s when the job was over",
                 (long)end->pid, even_signal_name(end->signal));
  even_cli_say(NULL, words);
}

static void say_replaced(const even_process_end *end) {
  char words[200];
  (void)snprintf(words, sizeof words,
                 "the job's agent (process %ld) was ended by %s: another host leads from now on, if they had agreed on "
                 "that (logs/leader.log there)",
                 (long)end->pid, even_signal_name(end->signal));
  even_cli_say(NULL, words);
}

/* This host's processes of the job are not gone on with. Their guardian ends them, too, unless it was killed beside the
 * agent. First what is kept for them is let go: as long as somebody has the socket at which the other hosts' agents ask
 * for the next agent here, they keep their ranks; and the leader waits for the end of its connection. */
static void end_rest(supervised *on) {
  enum { SWEEP_MS = 5000 };
  even_sweep sweep = {.session_count = 0};
  even_custody_release(&on->supervisor.custody);
  if (even_legacy_mark(&on->legacy, sweep.mark)) {
    (void)even_sweep_kill(&sweep, SWEEP_MS);
  }
}

/* None of the ranks may live when the job goes on, unless it is with them. */
static even_status await_turn(supervised *on, bool lives) {
  bool clear = false;
  if (lives) {
    return even_supervisor_pause(&on->supervisor, (uint64_t)on->waits_s * SECOND_NS);
  }
  end_rest(on);
  EVEN_TRY(even_supervisor_clear(&on->supervisor, CLEAR_NS, &clear));
  if (!clear) {
    (void)even_fail(EVEN_ERR_STATE, "processes of the job outlive its killed agent by %d s: none is started again",
                    (int)(CLEAR_NS / SECOND_NS));
    return even_error_fix("end them (`ps` shows what hangs in the disk or the driver), then --name NAME --resume auto");
  }
  return even_supervisor_pause(&on->supervisor, (uint64_t)on->waits_s * SECOND_NS);
}

/* *is_agent: in a new process, which has it all to do; else the job is over. */
static even_status run_agents(supervised *on, bool *is_agent, int *code) {
  for (;; on->starts++) {
    even_process_end end;
    on->started_ns = even_clock_ns();
    (void)fflush(NULL); /* else both would write it */
    EVEN_TRY(even_supervisor_start(&on->supervisor, is_agent));
    if (*is_agent) {
      return EVEN_OK;
    }
    if (on->secret != NULL) { /* the agents after it have what they need from those before */
      explicit_bzero(on->secret, strlen(on->secret));
    }
    EVEN_TRY(even_supervisor_wait(&on->supervisor, &end));
    *code = end.signal == 0 ? end.code : 128 + end.signal;
    bool asks = even_legacy_asks_again(&on->legacy); /* also one that was killed since */
    if (end.signal == 0 && !asks) {
      if (even_legacy_is_whole(&on->legacy)) { /* it has refused, and the ranks that it was to go on with live */
        end_rest(on);
      }
      return EVEN_OK;
    }
    if (even_legacy_is_over(&on->legacy, code)) {
      say_over(&end);
      end_rest(on);
      return EVEN_OK;
    }
    bool lives = even_legacy_is_whole(&on->legacy) && !on->supervisor.custody.broken;
    bool others = others_see_to_one_without_ranks(on);
    bool may = on->supervisor.asked == 0 && (lives || !others);
    bool again = may && may_again(on, &end, lives);
    if (!again && on->replaced && others && end.signal != 0 && on->supervisor.asked == 0) {
      say_replaced(&end);
    }
    if (again) {
      even_legacy_whole(&on->legacy, lives);
      EVEN_TRY(await_turn(on, lives));
    }
    bool goes_on = again && lives; /* what was asked meanwhile the next one is told: it ends the ranks as ever */
    if (on->supervisor.asked != 0 && !goes_on) {
      *code = 128 + on->supervisor.asked;
    }
    if (!again || (on->supervisor.asked != 0 && !goes_on)) {
      end_rest(on);
      return EVEN_OK;
    }
  }
}

/* As if the user had named what the agent before has made. */
static void become_agent(supervised *on, even_job_options *options) {
  options->legacy = &on->legacy;
  on->legacy.custody = strcmp(variable(), "anew") == 0 ? NULL : &on->supervisor.custody;
  on->legacy.folder = &on->supervisor.custody;
  if (even_legacy_run_name(&on->legacy) != NULL) {
    options->name = even_legacy_run_name(&on->legacy);
  }
}

/* Whether this is the agent: a new process. */
static bool supervise(supervised *on, int *code) {
  bool is_agent = false;
  on->legacy = (even_legacy){.memory = {.fd = -1}};
  on->supervisor = (even_supervisor){.signals = {.fd = -1}, .custody = {.socket = -1}, .child = -1};
  even_status status = even_legacy_open(&on->legacy);
  if (status == EVEN_OK) {
    status = even_supervisor_open(&on->supervisor);
  }
  if (status == EVEN_OK) {
    status = run_agents(on, &is_agent, code);
  }
  if (status == EVEN_OK && is_agent) {
    return true;
  }
  if (status != EVEN_OK) {
    *code = even_cli_fail_of(status);
  }
  if (status != EVEN_OK && !is_agent && on->supervisor.child < 0) { /* an agent that lives ends with this process */
    end_rest(on);
  }
  if (!is_agent) {
    even_supervisor_close(&on->supervisor);
  }
  even_legacy_close(&on->legacy);
  return false;
}

bool even_job_supervise(even_job_options *options, int *code) {
  static supervised on; /* an agent has it until its end */
  if (strcmp(variable(), "0") == 0 || others_see_to_it(options)) {
    return true;
  }
  bool replaced = is_replaced(options);
  on = (supervised){.whose = follows(options) ? "this host's" : "the job's",
                    .only_lives = replaced,
                    .replaced = replaced,
                    .most = options->max_restarts < 0 ? MOST_RESTARTS : (int)options->max_restarts};
  if (!supervise(&on, code)) {
    return false;
  }
  become_agent(&on, options);
  return true;
}

bool even_job_supervise_agent(char *invitation, struct even_legacy **legacy, int *code) {
  static supervised on; /* an agent has it until its end */
  on = (supervised){.whose = "this host's", .only_lives = true, .secret = invitation, .most = MOST_RESTARTS};
  if (!supervise(&on, code)) {
    return false;
  }
  on.legacy.custody = &on.supervisor.custody;
  *legacy = &on.legacy;
  return true;
}
