/* evenstep verify: whether a training on several ranks comes to what one device comes to, and if not, where it differs.
 */
#include "base/fail.h"
#include "base/json_reader.h"
#include "cli/job.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/path.h"
#include "os/thread.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* EXIT_DIFFERS: of the command, where all went well and the result is not the same. */
enum { EXIT_DIFFERS = 10, LARGEST_REPORT = 64 << 20, MOST_WORDS = 4096 };

typedef struct verify {
  even_job_options job;
  const char *output;
  int64_t steps;
  bool json;
  even_text measured; /* the file that rank 0 writes */
} verify;

static const even_usage usage = {
    .command = "verify",
    .synopsis = "evenstep verify [options] script.py|MODULE:FUNCTION [arguments]",
    .description =
        "Trains a few steps on one device and on all ranks, with parts of the batches that are uneven on purpose, and\n"
        "reports the largest difference between the parameters and where it is. A script is run as it stands, once on\n"
        "one rank and once on all, up to the step asked for. FUNCTION (of a module, or of FILE.py) returns what\n"
        "es.verify takes, (model, optimizer, data, loss) or a dict; where its result differs, the reason is tried out.",
    .epilogue =
        "exit codes:\n"
        "  0 the same within the bound (1e-12 in fp64, 1e-5 in fp32); 10 it differs; 3 nothing to verify was found;\n"
        "  else as of `evenstep run`\n"
        "\n"
        "examples:\n"
        "  evenstep verify -n 2 examples/char_gpt.py --layers 2\n"
        "  evenstep verify -n 3 --steps 20 my_training.py:small_model",
    .stop_at_operand = true,
};

/* A script that is not there would be told by a rank's traceback. MODULE:FUNCTION is looked for by Python. */
static even_status check_target(const char *target) {
  if (strchr(target, ':') != NULL || even_path_exists(target)) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_NOT_FOUND, "script %s does not exist", target);
  return even_error_fix("check the path; it is looked for from the working folder (MODULE:FUNCTION for a function)");
}

static even_status place_result(verify *on) {
  even_text relative = EVEN_TEXT_EMPTY;
  even_text_format(&relative, "%s/verify.%ld.json", on->job.runs_folder, (long)even_own_process());
  even_status status = even_text_status(&relative);
  if (status == EVEN_OK) {
    status = even_path_absolute(even_text_string(&relative), &on->measured);
  }
  even_text_free(&relative);
  return status;
}

static int measure(verify *on, size_t count, char **words) {
  char steps[32];
  const char *all[MOST_WORDS];
  size_t at = 0;
  if (count > MOST_WORDS - 5) {
    (void)even_fail(EVEN_ERR_USAGE, "verify: %zu words are more than it passes on", count);
    return even_cli_fail();
  }
  (void)snprintf(steps, sizeof steps, "%" PRId64, on->steps);
  all[at++] = "evenstep.verify_command";
  all[at++] = "--steps";
  all[at++] = steps;
  all[at++] = "--output";
  all[at++] = even_text_string(&on->measured);
  memcpy(&all[at], words, count * sizeof *words);
  return even_job_start(&on->job, NULL, at + count, (char **)(uintptr_t)all);
}

static even_status read_result(const verify *on, json_t **out) {
  even_text text = EVEN_TEXT_EMPTY;
  const char *path = even_text_string(&on->measured);
  if (!even_path_exists(path)) {
    (void)even_fail(EVEN_ERR_INPUT, "verify: the ranks ended and said nothing of a result");
    return even_error_fix("a script must not end its process by itself (os._exit) before its first steps are done");
  }
  even_status status = even_file_read(path, LARGEST_REPORT, &text);
  if (status == EVEN_OK) {
    status = even_json_parse(path, even_text_string(&text), text.length, out);
  }
  even_text_free(&text);
  return status;
}

/* The result's text is told beside the JSON, so that both say the same. */
static even_status show(const verify *on, const json_t *result, bool *exact) {
  const char *report = json_string_value(json_object_get(result, "report"));
  const json_t *verdict = json_object_get(result, "exact");
  if (report == NULL || !json_is_boolean(verdict)) {
    return even_fail(EVEN_ERR_INPUT, "%s is no result of this version", even_text_string(&on->measured));
  }
  *exact = json_is_true(verdict);
  char *text = json_dumps(result, JSON_INDENT(1));
  if (text == NULL) {
    return even_fail(EVEN_ERR_MEMORY, "the result needs more memory than there is");
  }
  even_status status = EVEN_OK;
  if (on->output != NULL) {
    status = even_file_replace(on->output, text, strlen(text));
  }
  (void)printf("%s\n", on->json ? text : report);
  free(text);
  return status;
}

static int run(verify *on, size_t count, char **words) {
  json_t *result = NULL;
  bool exact = false;
  even_status status = check_target(words[0]);
  if (status == EVEN_OK) {
    status = even_cli_check_output(on->output);
  }
  if (status == EVEN_OK) {
    status = place_result(on);
  }
  if (status != EVEN_OK) {
    return even_cli_fail_of(status);
  }
  int code = measure(on, count, words);
  if (code == 0) {
    status = read_result(on, &result);
    if (status == EVEN_OK) {
      status = show(on, result, &exact);
    }
    code = status != EVEN_OK ? even_cli_fail_of(status) : exact ? 0 : EXIT_DIFFERS;
  }
  json_decref(result);
  if (even_file_remove(even_text_string(&on->measured)) != EVEN_OK) {
    even_error_clear(); /* it stays in the runs folder; the result is not worse for it */
  }
  return code;
}

/* Of a job's options those that mean something here, and our own. */
static size_t declare(verify *on, even_option *table) {
  static const char *const kept[] = {"ranks",    "devices",   "name",   "runs-dir",
                                     "log-rank", "cpu-quota", "no-pin", "python"};
  size_t count = even_job_options_declare_some(&on->job, kept, sizeof kept / sizeof kept[0], table);
  even_job_options_tell_two_ranks(table, count);
  const even_option own[] = {
      {0, "steps", EVEN_OPTION_INTEGER, &on->steps, "N", "steps to train (default 5)", 1, 1000000},
      {'o', "output", EVEN_OPTION_TEXT, &on->output, "FILE", "also write what was found there, as JSON", 0, 0},
      {0, "json", EVEN_OPTION_FLAG, &on->json, NULL, "print it as JSON instead of words", 0, 0},
  };
  memcpy(table + count, own, sizeof own);
  return count + sizeof own / sizeof own[0];
}

int even_cli_verify(int argc, char **argv) {
  verify on = {.steps = 5};
  even_option table[EVEN_JOB_OPTION_ROOM + 3];
  int operand = 0;
  int code = 0;
  even_job_options_defaults(&on.job);
  on.job.log_rank = "none";
  size_t count = declare(&on, table);
  if (!even_cli_begin(&usage, table, count, argc, argv, -1, NULL, &operand, &code)) {
    return code;
  }
  if (operand >= argc) {
    (void)even_fail(EVEN_ERR_USAGE, "verify: of what?");
    (void)even_error_fix("evenstep verify [options] script.py|MODULE:FUNCTION [arguments]");
    return even_cli_fail();
  }
  if (on.job.ranks == NULL && on.job.devices == NULL) {
    on.job.ranks = "2";
  }
  on.job.module = true;
  on.job.quiet = true;
  on.job.no_monitor = true;
  on.job.max_restarts = 0;
  code = run(&on, (size_t)(argc - operand), argv + operand);
  even_text_free(&on.measured);
  return code;
}
