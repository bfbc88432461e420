/* The options of a job and their defaults. */
#include "cli/job.h"

#include <string.h>

void even_job_options_defaults(even_job_options *options) {
  memset(options, 0, sizeof *options);
  options->runs_folder = "runs";
  options->policy = "auto";
  options->log_rank = "0";
  options->max_restarts = -1;
  options->recovery = "restart";
  options->keep = 3;
  options->memory_copies = -1;
}

size_t even_job_options_declare(even_job_options *o, even_option *table) {
  const even_option declared[] = {
      {'n', "ranks", EVEN_OPTION_TEXT, &o->ranks, "N|auto",
       "ranks to start; auto: one a GPU, or without any one a NUMA node (default)", 0, 0},
      {0, "devices", EVEN_OPTION_TEXT, &o->devices, "LIST",
       "one rank on each, as `evenstep devices` names them: cpu:0,cuda:1", 0, 0},
      {0, "name", EVEN_OPTION_TEXT, &o->name, "NAME", "run folder runs/NAME (default: the script's name and the time)",
       0, 0},
      {0, "runs-dir", EVEN_OPTION_TEXT, &o->runs_folder, "DIR", "where run folders are made (default runs)", 0, 0},
      {0, "policy", EVEN_OPTION_TEXT, &o->policy, "P", "auto (default), equal, proportional, dynamic or hybrid", 0, 0},
      {0, "profile", EVEN_OPTION_TEXT, &o->profile, "FILE",
       "speeds of the devices (default gpu_profiles.json where present)", 0, 0},
      {0, "log-rank", EVEN_OPTION_TEXT, &o->log_rank, "R", "ranks whose output is shown: 0 (default), 0,2, all, none",
       0, 0},
      {0, "max-restarts", EVEN_OPTION_INTEGER, &o->max_restarts, "N",
       "restarts in a row without a newer checkpoint (default 3, none for a script's own error before a checkpoint)", 0,
       1000000},
      {0, "recovery", EVEN_OPTION_TEXT, &o->recovery, "restart|shrink|replace",
       "when a rank is killed: start all again from the last checkpoint (default), or let the others go on; replace: "
       "until "
       "another process joins them",
       0, 0},
      {0, "spares", EVEN_OPTION_TEXT, &o->spares, "N|HOST:N,…",
       "processes that wait in es.prepare to take the place of a lost rank (--recovery replace; default 0); of several "
       "hosts N on all in turn, or where you say",
       0, 0},
      {0, "min-ranks", EVEN_OPTION_INTEGER, &o->min_ranks, "N",
       "with fewer ranks left than N, restart; with replace: save, and wait for others (default 1); of several hosts: "
       "with N left go on without one that is lost, with fewer wait, saved, until hosts are back or join",
       1, 1000000},
      {0, "max-ranks", EVEN_OPTION_INTEGER, &o->max_ranks, "N",
       "let hosts join while the job runs (`evenstep join`), up to N ranks; needs EVENSTEP_JOB_KEY or _FILE", 1, 4096},
      {0, "join-port", EVEN_OPTION_INTEGER, &o->join_port, "N", "where they come (default any free port)", 1, 65535},
      {0, "checkpoint-every", EVEN_OPTION_TEXT, &o->checkpoint_every, "N|Ts",
       "a checkpoint every N steps or T seconds: 100, 30s", 0, 0},
      {0, "checkpoint-dir", EVEN_OPTION_TEXT, &o->checkpoint_folder, "DIR",
       "where they are kept (default in the run folder)", 0, 0},
      {0, "checkpoint-to", EVEN_OPTION_TEXT, &o->checkpoint_to, "URL",
       "and at another place, too: s3://bucket/run, gs://…", 0, 0},
      {0, "keep", EVEN_OPTION_INTEGER, &o->keep, "N", "newest checkpoints to keep (default 3)", 1, 1000000},
      {0, "keep-every", EVEN_OPTION_TEXT, &o->keep_every, "N|Ts",
       "and the first of every N steps or T seconds, for good: 1000, 3600s", 0, 0},
      {0, "resume", EVEN_OPTION_TEXT, &o->resume, "auto|PATH|URL",
       "go on from the newest checkpoint of the run (with --checkpoint-to also of that place), or from PATH or URL", 0,
       0},
      {0, "set-aside", EVEN_OPTION_FLAG, &o->set_aside, NULL,
       "leave a place out whose rank is the first to fail in two attempts in a row, for 1 min, then longer", 0, 0},
      {0, "cpu-quota", EVEN_OPTION_TEXT, &o->cpu_quota, "R:F,…",
       "slow rank R down to the fraction F of its cores: 1:0.25", 0, 0},
      {0, "hang-timeout", EVEN_OPTION_TEXT, &o->hang_timeout, "SECONDS|off",
       "a rank without progress for so long, or 10 x its p99, hangs (default 30)", 0, 0},
      {0, "on-hang", EVEN_OPTION_TEXT, &o->on_hang, "report|restart",
       "tell its stacks (default), and end the attempt, so that the job restarts", 0, 0},
      {0, "on-straggler", EVEN_OPTION_TEXT, &o->on_straggler, "keep|replace|leave",
       "a rank that holds the others up for long: keep it (default), or end it, so that another process takes its "
       "place "
       "(--recovery replace) or the others go on without it (--recovery shrink)",
       0, 0},
      {0, "straggler-gain", EVEN_OPTION_TEXT, &o->straggler_gain, "PERCENT",
       "by so much steps must be shorter then, by the balancer's models (default 5)", 0, 0},
      {0, "straggler-patience", EVEN_OPTION_TEXT, &o->straggler_patience, "SECONDS",
       "and for so long, without a break (default 60)", 0, 0},
      {0, "straggler-watch", EVEN_OPTION_TEXT, &o->straggler_watch, "X[:SECONDS]|off",
       "tell of a rank that takes X times its usual time for so long (default 1.5:2)", 0, 0},
      {0, "link-watch", EVEN_OPTION_TEXT, &o->link_watch, "X[:SECONDS]|off",
       "tell of a link between hosts that takes X times its usual time for so long (default 3:3)", 0, 0},
      {0, "gpu-watch", EVEN_OPTION_TEXT, &o->gpu_watch, "SECONDS|off",
       "ask NVML how the GPUs are each so many seconds (default 1)", 0, 0},
      {0, "loss-spike", EVEN_OPTION_TEXT, &o->loss_spike, "X|off",
       "tell of a loss so many deviations above the median of the last 128 (default 10)", 0, 0},
      {0, "notice", EVEN_OPTION_TEXT, &o->notice, "SECONDS",
       "at SIGTERM or SIGUSR1 save the state after the step under way and end with 75, within so long", 0, 0},
      {0, "notice-from", EVEN_OPTION_TEXT, &o->notice_from, "PLACE|off",
       "each host asks for its own whether its machine ends soon, and takes that as notice: aws, gcp, azure, auto (the "
       "one of these that answers), http://ADDRESS:PORT/PATH, or exec:COMMAND (exit code 0)",
       0, 0},
      {0, "on-nonfinite", EVEN_OPTION_TEXT, &o->on_nonfinite, "report|skip|stop",
       "a loss or gradient that is not finite: tell it (default), leave its step out too, or end the job", 0, 0},
      {0, "check-parameters", EVEN_OPTION_TEXT, &o->check_parameters, "K|off",
       "every K steps compare the ranks' parameters (default 100)", 0, 0},
      {0, "on-difference", EVEN_OPTION_TEXT, &o->on_difference, "report|stop",
       "parameters that differ between ranks: tell it (default), or end the job", 0, 0},
      {0, "batch-adapt", EVEN_OPTION_TEXT, &o->batch_adapt, "A:B,lr=RULE",
       "the global batch follows the gradients' noise, from A to B samples; RULE: linear, sqrt, adascale or none", 0,
       0},
      {0, "no-pin", EVEN_OPTION_FLAG, &o->no_pin, NULL, "leave the ranks on all CPUs", 0, 0},
      {0, "port", EVEN_OPTION_INTEGER, &o->port, "N", "port of the page on 127.0.0.1 (default any free one)", 1, 65535},
      {0, "no-monitor", EVEN_OPTION_FLAG, &o->no_monitor, NULL, "no page and no history", 0, 0},
      {0, "whole-history", EVEN_OPTION_FLAG, &o->whole_history, NULL,
       "keep every step in run.db, however large it grows (default: old ones are merged)", 0, 0},
      {0, "timeline", EVEN_OPTION_FLAG, &o->timeline, NULL,
       "keep each collective and message for `evenstep report --timeline`", 0, 0},
      {0, "timeline-calls", EVEN_OPTION_INTEGER, &o->timeline_calls, "N",
       "the last N calls of each rank are kept (default 20000; implies --timeline)", 1, 100000000},
      {0, "hosts", EVEN_OPTION_TEXT, &o->hosts, "A,B:N,…|auto",
       "ranks on these hosts, this one first; N: how many there (default as -n says); auto: where srun or mpirun "
       "started this",
       0, 0},
      {0, "ssh", EVEN_OPTION_TEXT, &o->ssh, "COMMAND",
       "runs a program on a host, given the name and the program (default ssh, without passwords)", 0, 0},
      {0, "address", EVEN_OPTION_TEXT, &o->address, "IP",
       "where the other hosts reach this one (default: any of its addresses)", 0, 0},
      {0, "rendezvous", EVEN_OPTION_TEXT, &o->rendezvous, "FOLDER|HOST:PORT",
       "of --hosts auto: a folder that all hosts see (default the working folder), or where process 0 is", 0, 0},
      {0, "replace-leader", EVEN_OPTION_FLAG, &o->replace_leader, NULL,
       "of three hosts and more another one takes this one's place when it is lost (default, but for --hosts auto)", 0,
       0},
      {0, "no-replace-leader", EVEN_OPTION_FLAG, &o->keep_leader, NULL,
       "the job ends with this host, and this host goes on whatever others are lost", 0, 0},
      {0, "restart-agent", EVEN_OPTION_FLAG, &o->restart_agent, NULL, NULL, 0, 0},
      {0, "checkpoint-copies", EVEN_OPTION_INTEGER, &o->checkpoint_copies, "N",
       "keep the newest checkpoint on N other hosts, too (default 0)", 0, 512},
      {0, "checkpoint-memory", EVEN_OPTION_INTEGER, &o->checkpoint_memory, "K",
       "every K steps a checkpoint in memory, from which the job restarts where it is newer than the disk's", 1,
       INT32_MAX},
      {0, "memory-copies", EVEN_OPTION_INTEGER, &o->memory_copies, "N",
       "keep the newest in the memory of N other hosts, too (default 1 with --checkpoint-memory)", 0, 512},
      {0, "witness", EVEN_OPTION_TEXT, &o->witness, "HOST",
       "of two hosts, a third machine without ranks that votes: with it, either may take the other one's place", 0, 0},
      {0, "python", EVEN_OPTION_TEXT, &o->python, "PATH", "the interpreter (default: of this installation, or on PATH)",
       0, 0},
      {'m', "module", EVEN_OPTION_FLAG, &o->module, NULL, "the operand is a module, as in python -m", 0, 0},
      {0, "no-python", EVEN_OPTION_FLAG, &o->no_python, NULL, "the operand is a program, not a Python script", 0, 0},
      {'q', "quiet", EVEN_OPTION_FLAG, &o->quiet, NULL, "only what the ranks print, and errors", 0, 0},
      {0, "json", EVEN_OPTION_FLAG, &o->json, NULL,
       "a JSON object with the outcome as the last line of standard output", 0, 0},
  };
  _Static_assert(sizeof declared / sizeof declared[0] <= EVEN_JOB_OPTION_ROOM, "room for all options");
  memcpy(table, declared, sizeof declared);
  return sizeof declared / sizeof declared[0];
}

size_t even_job_options_declare_some(even_job_options *options, const char *const *names, size_t count,
                                     even_option *table) {
  even_option all[EVEN_JOB_OPTION_ROOM];
  size_t declared = 0;
  size_t known = even_job_options_declare(options, all);
  for (size_t i = 0; i < known; i++) {
    for (size_t k = 0; k < count; k++) {
      if (strcmp(all[i].name, names[k]) == 0) {
        table[declared++] = all[i];
      }
    }
  }
  return declared;
}

void even_job_options_tell_two_ranks(even_option *table, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (strcmp(table[i].name, "ranks") == 0) {
      table[i].help = "ranks to start (default 2)";
    }
  }
}
