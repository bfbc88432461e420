/* --hosts auto: a process that another program started on a host of the job, and that does not lead it. */
#include "base/fail.h"
#include "cli/job_setup.h"
#include "orchestrator/hosts.h"
#include "orchestrator/legacy.h"
#include "orchestrator/outlast.h"
#include "os/clock.h"
#include "os/signals.h"

#include <stdio.h>
#include <string.h>

static const uint64_t PAUSE_NS = 250000000u;

even_status even_job_meet(const even_job_options *options, even_rendezvous *rendezvous, char key[EVEN_KEY_DIGITS + 1]) {
  const char *where = options->rendezvous == NULL ? "." : options->rendezvous;
  EVEN_TRY(even_job_key_read(key));
  return even_rendezvous_open(where, options->launched, key[0] != '\0', rendezvous);
}

/* Wrong words are told by each process, not after a wait for one that has ended for them. */
static even_status check(const even_job_options *options, size_t count, char **words) {
  even_job_setup setup;
  memset(&setup, 0, sizeof setup);
  setup.lock = -1;
  EVEN_TRY(even_job_check_hosts(options));
  even_status status = even_job_command(options, count, words, &setup);
  even_job_setup_close(&setup);
  return status;
}

static even_status try_once(const even_job_options *options, const even_rendezvous *rendezvous, const char *key,
                            bool *invited, bool *met, int *code) {
  even_text line = EVEN_TEXT_EMPTY;
  bool resumes = even_outlast_due(options->legacy); /* it has the leader from the agent before */
  even_status status = resumes ? EVEN_OK : even_rendezvous_read(rendezvous, options->launched, key, &line);
  *invited = status == EVEN_OK;
  if (*invited) {
    status = even_hosts_serve(even_text_string(&line), NULL, met, NULL, options->legacy, code);
  }
  if (line.data != NULL) {
    explicit_bzero(line.data, line.length);
  }
  even_text_free(&line);
  return status;
}

/* Whether the leader may only not be there yet, or not wait for this one yet: its file is not there, or is one that a
 * job left that was killed, whatever that says. */
static bool may_come(even_status status, bool invited, bool in_file) {
  return status == EVEN_ERR_NOT_FOUND || status == EVEN_ERR_TIMEOUT || status == EVEN_ERR_SYSTEM ||
         status == EVEN_ERR_PEER_LOST ||
         (in_file &&
          (status == EVEN_ERR_INPUT || status == EVEN_ERR_MISMATCH || (status == EVEN_ERR_PERMISSION && invited)));
}

/* It had served a leader, whose agent may be started again, as this one would be. */
static bool may_lead_again(const even_job_options *options, even_status status, bool met) {
  return options->legacy != NULL && met &&
         (status == EVEN_ERR_PEER_LOST || status == EVEN_ERR_TIMEOUT || status == EVEN_ERR_SYSTEM);
}

static void tell_lost(double patience) {
  char words[512];
  (void)snprintf(words, sizeof words,
                 "the leader of this job is lost (%.300s): its next agent is looked for, for %.0f s",
                 even_error_last()->what, patience);
  even_cli_say(NULL, words);
}

static even_status tell_late(const even_rendezvous *rendezvous, double patience) {
  const even_error last = *even_error_last();
  if (last.status == EVEN_ERR_PERMISSION) {
    return even_error_prefix("process 0 of the job was not found within %.0f s", patience);
  }
  (void)even_fail(EVEN_ERR_TIMEOUT,
                  "process 0 of the job was not found, or did not take this one, within %.0f s: %.500s", patience,
                  last.what);
  if (rendezvous->address[0] != '\0') {
    return even_error_fix("does it run, and is %s, port %d, reached from here?", rendezvous->address, rendezvous->port);
  }
  return even_error_fix("does it run, and do all hosts see the folder of %s? --rendezvous names one that they do",
                        rendezvous->path.data);
}

static even_status follow(const even_job_options *options, int *code) {
  even_rendezvous rendezvous = {.path = EVEN_TEXT_EMPTY};
  char key[EVEN_KEY_DIGITS + 1] = "";
  bool invited = false;
  bool once = false;
  bool *met = options->legacy == NULL ? &once : even_legacy_taken(options->legacy);
  double patience = 0;
  EVEN_TRY(even_job_patience(&patience));
  uint64_t until = even_clock_ns() + (uint64_t)(patience * 1e9);
  even_status status = even_job_meet(options, &rendezvous, key);
  bool again = status == EVEN_OK;
  while (again) {
    status = try_once(options, &rendezvous, key, &invited, met, code);
    if (may_lead_again(options, status, *met)) {
      tell_lost(patience);
      until = even_clock_ns() + (uint64_t)(patience * 1e9);
      *met = false;
    }
    bool ends = options->legacy != NULL && options->legacy->page->again; /* with ranks that it could not go on with */
    again = status != EVEN_OK && !*met && !ends && may_come(status, invited, rendezvous.address[0] == '\0');
    if (again && even_signals_end_pending() != 0) {
      *code = 128 + even_signals_end_pending();
      status = EVEN_OK;
      again = false;
    } else if (again && even_clock_ns() > until) {
      status = tell_late(&rendezvous, patience);
      again = false;
    } else if (again) {
      even_clock_sleep_ns(PAUSE_NS);
    }
  }
  if (status == EVEN_ERR_PERMISSION && invited && !*met) {
    (void)even_error_fix("give all hosts the same key");
  }
  explicit_bzero(key, sizeof key);
  even_rendezvous_free(&rendezvous);
  return status;
}

int even_job_follow(const even_job_options *options, size_t count, char **words) {
  int code = 0;
  even_status status = even_signals_block();
  if (status == EVEN_OK) {
    status = check(options, count, words);
  }
  if (status == EVEN_OK) {
    status = follow(options, &code);
  }
  return status == EVEN_OK ? code : even_cli_fail_of(status);
}
