/* evenstep run: starts a script on every device. */
#include "base/fail.h"
#include "cli/job.h"
#include "cli/run_plan.h"
#include "orchestrator/launched.h"

#include <stdlib.h>
#include <string.h>

static const even_usage usage = {
    .command = "run",
    .synopsis = "evenstep run [options] script.py [arguments]",
    .description =
        "Starts one process (rank) of the script on each device, pinned to it, with the environment that\n"
        "torchrun gives; shows and keeps what they print; restarts the job from its last checkpoint when a\n"
        "rank dies. Options end at the script: what follows is the script's.",
    .epilogue =
        "exit codes:\n"
        "  the script's own; 128 + N after signal N; 130 after Ctrl-C\n"
        "  2 a wrong option, 3 a file that does not exist or is not valid, 4 a device that does not exist,\n"
        "  5 the operating system refused something, 6 a damaged checkpoint to resume from,\n"
        "  7 a rank ended well while the others still needed it\n"
        "\n"
        "examples:\n"
        "  evenstep run train.py --epochs 3\n"
        "  evenstep run --devices cpu:0,cuda:0 --checkpoint-every 30s train.py\n"
        "  evenstep run --hosts here,there:2 train.py        # on this host, and two ranks on another\n"
        "  srun --ntasks-per-node=1 evenstep run --hosts auto train.py     # on all hosts of a Slurm job\n"
        "  evenstep run -n 2 --cpu-quota 1:0.25 train.py     # the second rank four times slower",
    .stop_at_operand = true,
};

/* Given in the environment, a URL with a password is in no command line. In a rank of another job the variable is that
 * job's: its place is not for the checkpoints of this one. */
static const char *place_of_user(void) {
  return getenv("EVENSTEP_JOB") == NULL ? getenv("EVENSTEP_CHECKPOINT_TO") : NULL;
}

static int start_here(even_job_options *options, size_t count, char **words) {
  even_run_plan plan;
  int code = 0;
  even_run_plan_read(options, &plan);
  if (even_job_supervise(options, &code)) {
    even_run_plan_follow(&plan, options);
    code = even_job_start(options, NULL, count, words);
  }
  even_run_plan_free(&plan);
  return code;
}

static int start(even_job_options *options, size_t count, char **words) {
  int code = 0;
  if (options->launched == NULL) {
    return start_here(options, count, words);
  }
  if (!even_job_supervise(options, &code)) {
    return code;
  }
  even_launched_forget();
  return options->launched->place == 0 ? even_job_start(options, NULL, count, words)
                                       : even_job_follow(options, count, words);
}

/* Started once a host by another program: the first process leads, the others follow. */
static int start_launched(even_job_options *options, size_t count, char **words) {
  even_launched launched;
  int code = 0;
  if (even_launched_find(getenv, &launched) == EVEN_OK) {
    options->launched = &launched;
    code = start(options, count, words);
    options->launched = NULL;
  } else {
    code = even_cli_fail();
  }
  even_launched_free(&launched);
  return code;
}

int even_cli_run(int argc, char **argv) {
  even_job_options options;
  even_option table[EVEN_JOB_OPTION_ROOM];
  int operand = 0;
  bool helped = false;
  even_job_options_defaults(&options);
  size_t known = even_job_options_declare(&options, table);
  if (even_options_parse(&usage, table, known, argc, argv, &operand, &helped) != EVEN_OK) {
    return even_cli_fail();
  }
  if (helped) {
    return 0;
  }
  if (operand >= argc) {
    (void)even_fail(EVEN_ERR_USAGE, "run: no script was given");
    (void)even_error_fix("evenstep run [options] script.py [arguments]");
    return even_cli_fail();
  }
  if (options.checkpoint_to == NULL) {
    options.checkpoint_to = place_of_user();
  }
  if (options.hosts != NULL && strcmp(options.hosts, "auto") == 0) {
    return start_launched(&options, (size_t)(argc - operand), argv + operand);
  }
  return start(&options, (size_t)(argc - operand), argv + operand);
}
