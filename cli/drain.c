/* evenstep drain: takes a host out of a job of several that runs. */
#include "base/fail.h"
#include "base/json_writer.h"
#include "cli/command.h"
#include "cli/run_folder.h"
#include "orchestrator/control.h"

static const even_usage usage = {
    .command = "drain",
    .synopsis = "evenstep drain [options] HOST",
    .description =
        "Takes a host out of a job of several that runs: the training saves its state after the step under\n"
        "way and goes on from there on the other hosts, with their ranks; no restart of --max-restarts is\n"
        "used up. HOST is its name as `evenstep run` says it. Typed on the host that leads the job, which\n"
        "itself stays; returns when HOST is free. Ctrl-C ends the waiting, not the draining.",
    .epilogue =
        "exit codes:\n"
        "  0 the host is out of the job, 3 no such host, or no such job on this host,\n"
        "  7 the job ended first, 8 the host leads the job, 9 too few ranks would be left\n"
        "\n"
        "examples:\n"
        "  evenstep drain node7               # of the run in runs/ that lives\n"
        "  evenstep drain --run night node7",
};

static even_status ask(const char *run, const char *host) {
  even_text folder = EVEN_TEXT_EMPTY;
  even_text line = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&line, 0);
  even_json_object(&json, NULL);
  even_json_string(&json, "command", "drain");
  even_json_string(&json, "host", host);
  even_json_object_end(&json);
  even_status status = even_text_status(&line);
  if (status == EVEN_OK) {
    status = even_run_folder_at_all(run, &folder);
  }
  if (status == EVEN_OK) {
    status = even_control_ask(even_text_string(&folder), line.data, even_cli_say, NULL);
    if (status == EVEN_ERR_NOT_FOUND && even_error_last()->fix[0] == '\0') {
      (void)even_error_fix(
          "no job of several hosts that this host leads runs there; type it on the host that leads it");
    }
  }
  even_text_free(&line);
  even_text_free(&folder);
  return status;
}

int even_cli_drain(int argc, char **argv) {
  const char *run = NULL;
  const even_option options[] = {
      {0, "run", EVEN_OPTION_TEXT, &run, "RUN", "the run's folder, or its name in runs/ (default: the one that lives)",
       0, 0},
  };
  int operand = 0;
  int code = 0;
  if (!even_cli_begin(&usage, options, sizeof options / sizeof options[0], argc, argv, 1, NULL, &operand, &code)) {
    return code;
  }
  if (operand >= argc) {
    (void)even_fail(EVEN_ERR_USAGE, "drain: no host was named");
    (void)even_error_fix("%s", usage.synopsis);
    return even_cli_fail();
  }
  even_status status = ask(run, argv[operand]);
  return status == EVEN_OK ? 0 : even_cli_fail_of(status);
}
