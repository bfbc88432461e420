/* The options of `evenstep chaos`: which of a job's it takes, which it refuses and why, and the words with which both
 * runs are started. */
#include "base/fail.h"
#include "cli/chaos_command.h"
#include "os/path.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_FAULTS = 1000, MOST_OWN_WORDS = 64 };

size_t even_chaos_declare(even_chaos_command *on, even_option *table) {
  static const char *const kept[] = {"ranks",         "devices",          "name",      "runs-dir", "policy",
                                     "profile",       "checkpoint-every", "cpu-quota", "no-pin",   "python",
                                     "recovery",      "spares",           "min-ranks", "module",   "checkpoint-memory",
                                     "memory-copies", "max-ranks",        "set-aside", "ssh",      "address",
                                     "witness",       "checkpoint-copies"};
  size_t count = even_job_options_declare_some(&on->job, kept, sizeof kept / sizeof kept[0], table);
  const even_option own[] = {
      {0, "seed", EVEN_OPTION_INTEGER, &on->seed, "N", "of the faults (default: another each time, printed)", 0,
       INT64_MAX},
      {0, "faults", EVEN_OPTION_INTEGER, &on->count, "N", "faults to inject (default 3)", 1, MOST_FAULTS},
      {0, "kinds", EVEN_OPTION_TEXT, &on->kinds, "LIST", "of which kinds: all (default), or kill,stop,…", 0, 0},
      {0, "against", EVEN_OPTION_TEXT, &on->against, "RUN",
       "a run of before in the same folder, in place of an undisturbed one of its own", 0, 0},
      {0, "namespaces", EVEN_OPTION_FLAG, &on->namespaces, NULL,
       "several hosts, made of network namespaces (root), with -n ranks each: for partition", 0, 0},
      {0, "hosts", EVEN_OPTION_TEXT, &on->job.hosts, "A,B:N,…|N",
       "on these hosts, this one first, as of `evenstep run`; of --namespaces: how many, 2 (default) or 3", 0, 0},
      {0, "part", EVEN_OPTION_FLAG, &on->part, NULL, NULL, 0, 0}, /* not for people */
      {0, "replace-leader", EVEN_OPTION_FLAG, &on->replace_leader, NULL,
       "of --hosts 3: another host takes the place of the agent that is killed, or cut off, once (default: it is "
       "started again, or waits for the others)",
       0, 0},
      {0, "restart-agent", EVEN_OPTION_FLAG, &on->restart_agent, NULL,
       "`agent` comes to the agent alone, also where it leads, and another one goes on with its ranks", 0, 0},
      {0, "hold", EVEN_OPTION_NUMBER, &on->hold, "SECONDS",
       "how long stops, neighbours and lack of disk or memory last (default 5)", 0, 0},
      {0, "tolerance", EVEN_OPTION_NUMBER, &on->tolerance, "X",
       "relative norm by which a tensor may differ (default 0: the same to the bit, as --policy equal, the default "
       "here, "
       "promises)",
       0, 0},
      {0, "json", EVEN_OPTION_FLAG, &on->json, NULL, "print the outcome as JSON instead of words", 0, 0},
  };
  _Static_assert(EVEN_JOB_OPTION_ROOM + sizeof own / sizeof own[0] <= EVEN_CHAOS_OPTION_ROOM, "room for all options");
  memcpy(table + count, own, sizeof own);
  return count + sizeof own / sizeof own[0];
}

bool even_chaos_has_own_hosts(const even_chaos_command *on) {
  return !on->namespaces && on->job.hosts != NULL;
}

static bool is_number(const char *text) {
  return text[0] != '\0' && text[strspn(text, "0123456789")] == '\0';
}

/* A number is of --namespaces, names are not. */
static even_status check_hosts(even_chaos_command *on) {
  const char *hosts = on->job.hosts;
  if (hosts == NULL || (!on->namespaces && !is_number(hosts) && strcmp(hosts, "auto") != 0)) {
    return EVEN_OK;
  }
  if (!on->namespaces) {
    (void)even_fail(EVEN_ERR_USAGE, "chaos: --hosts %.20s: a number of hosts is of --namespaces", hosts);
    return even_error_fix(
        "name the hosts, this one first: --hosts here,there; or add --namespaces (root), which makes "
        "them on this machine");
  }
  on->hosts = is_number(hosts) && strlen(hosts) < 3 ? strtol(hosts, NULL, 10) : 0;
  if (on->hosts < 2 || on->hosts > EVEN_CHAOS_HOSTS) {
    (void)even_fail(EVEN_ERR_USAGE, "chaos: --hosts %.100s: --namespaces makes 2 or 3 hosts", hosts);
    return even_error_fix("give 2 or 3, or leave --namespaces out for hosts of your own");
  }
  return EVEN_OK;
}

/* What is of hosts of the user's own, or of several. */
static even_status check_own(const even_chaos_command *on) {
  const bool own = even_chaos_has_own_hosts(on);
  const char *alone = on->job.ssh != NULL ? "--ssh" : on->job.address != NULL ? "--address" : NULL;
  if (alone != NULL && !own) {
    (void)even_fail(EVEN_ERR_USAGE, "chaos: %s is of hosts of your own", alone);
    return even_error_fix("name them: --hosts here,there; or leave it out");
  }
  if (own && on->job.devices != NULL) {
    (void)even_fail(EVEN_ERR_USAGE, "chaos: --devices is of this host, and --hosts of several");
    return even_error_fix("leave out one of the two");
  }
  return EVEN_OK;
}

even_status even_chaos_check_options(even_chaos_command *on) {
  EVEN_TRY(check_hosts(on));
  EVEN_TRY(check_own(on));
  const bool own = even_chaos_has_own_hosts(on);
  if (on->job.checkpoint_copies > 0 && !own) {
    (void)even_fail(EVEN_ERR_USAGE,
                    "chaos: --checkpoint-copies: the hosts of --namespaces share this machine's disk, so none is made");
    return even_error_fix(
        "name hosts of your own (--hosts here,there), or leave it out; --checkpoint-memory has copies "
        "in the memory of other hosts");
  }
  if (on->job.witness != NULL && !own) {
    (void)even_fail(EVEN_ERR_USAGE, "chaos: --witness %.100s: none of the hosts of --namespaces is without ranks",
                    on->job.witness);
    return even_error_fix(
        "name hosts of your own (--hosts here,there); --namespaces --hosts 3 --replace-leader has "
        "three hosts that vote");
  }
  if (on->job.memory_copies > 0 && !on->namespaces && !own) {
    (void)even_fail(EVEN_ERR_USAGE, "chaos: --memory-copies is of several hosts");
    return even_error_fix(
        "name them (--hosts here,there), add --namespaces (root), which makes them on this machine, or "
        "leave it out");
  }
  if (on->replace_leader && own) {
    (void)even_fail(EVEN_ERR_USAGE,
                    "chaos: --replace-leader is of three hosts of --namespaces: another leader on a host "
                    "of your own could not be seen from here");
    return even_error_fix("leave it out: the job whose leader's agent is killed is started again from here");
  }
  return EVEN_OK;
}

static void add(even_chaos_command *on, const char *word) {
  on->words[on->word_count++] = word;
}

static void add_pair(even_chaos_command *on, const char *option, const char *value) {
  if (value != NULL) {
    add(on, option);
    add(on, value);
  }
}

/* `least`: below it the option was not given. */
static void add_number(even_chaos_command *on, const char *option, int64_t number, int64_t least, char text[24]) {
  (void)snprintf(text, 24, "%lld", (long long)number);
  add_pair(on, option, number < least ? NULL : text);
}

even_status even_chaos_make_words(even_chaos_command *on, size_t count, char **words) {
  if (count > EVEN_CHAOS_MOST_WORDS - MOST_OWN_WORDS) {
    return even_fail(EVEN_ERR_USAGE, "chaos: %zu words are more than it passes on", count);
  }
  EVEN_TRY(even_program_path(&on->program));
  if (on->namespaces) {
    add(on, "nsenter");
    add(on, on->network.enter);
  }
  add(on, even_text_string(&on->program));
  add(on, "run");
  if (on->namespaces) {
    add_pair(on, "--hosts", even_text_string(&on->network.names));
    add_pair(on, "--ssh", on->network.shell_path);
    add(on, on->replace_leader ? "--replace-leader" : "--no-replace-leader"); /* it is started again from here */
  }
  if (even_chaos_has_own_hosts(on)) {
    add_pair(on, "--hosts", on->job.hosts);
    add_pair(on, "--ssh", on->job.ssh);
    add_pair(on, "--address", on->job.address);
    add_pair(on, "--witness", on->job.witness);
    add_number(on, "--checkpoint-copies", on->job.checkpoint_copies, 1, on->copies);
    if (on->job.witness == NULL) {
      add(on, "--no-replace-leader"); /* it is started again from here */
    }
  }
  add_pair(on, "--runs-dir", on->job.runs_folder);
  add_pair(on, "--ranks", on->job.ranks);
  add_pair(on, "--devices", on->job.devices);
  add_pair(on, "--policy", on->job.policy);
  add_pair(on, "--profile", on->job.profile);
  add_pair(on, "--checkpoint-every", on->job.checkpoint_every);
  add_number(on, "--checkpoint-memory", on->job.checkpoint_memory, 1, on->memory_steps);
  add_number(on, "--memory-copies", on->job.memory_copies, 0, on->memory_copies);
  add_number(on, "--max-ranks", on->job.max_ranks, 1, on->most);
  add_pair(on, "--cpu-quota", on->job.cpu_quota);
  add_pair(on, "--python", on->job.python);
  if ((on->kinds_set >> EVEN_CHAOS_NAN & 1u) != 0) { /* such a step is not to be made: the job begins again before it */
    add_pair(on, "--on-nonfinite", "stop");
  }
  add_pair(on, "--log-rank", "none");
  add(on, "--quiet");
  add(on, "--json");
  if (on->job.set_aside) {
    add(on, "--set-aside");
  }
  if (on->job.no_pin || on->namespaces) { /* all hosts are this machine */
    add(on, "--no-pin");
  }
  on->script = on->word_count;
  if (on->job.module) {
    add(on, "--module");
  }
  for (size_t i = 0; i < count; i++) {
    add(on, words[i]);
  }
  return EVEN_OK;
}
