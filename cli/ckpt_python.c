/* Starts a Python module for a subcommand, and tells what it found. */
#include "cli/ckpt_python.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/utf8.h"
#include "cli/command.h"
#include "cli/python.h"
#include "os/dialogue.h"
#include "os/path.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* LIMIT_MS: a disk's worth of weights may take hours; who waits may interrupt. */
enum { MOST_SHOWN = 1024 };
static const int64_t limit_ms = INT64_C(7) * 24 * 3600 * 1000;

static even_status status_of_code(json_int_t code) {
  static const even_status known[] = {EVEN_ERR_USAGE, EVEN_ERR_INPUT, EVEN_ERR_SYSTEM, EVEN_ERR_CORRUPT,
                                      EVEN_ERR_UNSUPPORTED};
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    if (even_status_exit_code(known[i]) == (int)code) {
      return known[i];
    }
  }
  return EVEN_ERR_SYSTEM;
}

even_status even_ckpt_python_error(const char *module, const json_t *answer) {
  const char *what = json_string_value(json_object_get(answer, "what"));
  const char *fix = json_string_value(json_object_get(answer, "fix"));
  char shown[MOST_SHOWN];
  if (what == NULL) {
    return even_fail(EVEN_ERR_INPUT, "%s gave no answer of this version", module);
  }
  even_status status = even_fail(status_of_code(json_integer_value(json_object_get(answer, "code"))), "%s",
                                 even_utf8_clean(what, shown, sizeof shown));
  return fix == NULL || fix[0] == '\0' ? status : even_error_fix("%s", even_utf8_clean(fix, shown, sizeof shown));
}

/* Prints what Python found, or makes its error ours. */
static even_status tell(const char *module, bool as_json, const json_t *answer) {
  const char *text = json_string_value(json_object_get(answer, "text"));
  if (text == NULL) {
    return even_ckpt_python_error(module, answer);
  }
  if (!as_json) {
    (void)printf("%s\n", text);
    return EVEN_OK;
  }
  char *report = json_dumps(json_object_get(answer, "report"), JSON_INDENT(2) | JSON_PRESERVE_ORDER);
  (void)printf("%s\n", report == NULL ? "null" : report);
  free(report);
  return EVEN_OK;
}

static even_status hear(even_dialogue *dialogue, const char *python, json_t **out) {
  even_text last = EVEN_TEXT_EMPTY;
  even_status status = EVEN_OK;
  char complaint[512];
  for (;;) {
    const char *line = NULL;
    status = even_dialogue_hear(dialogue, limit_ms, &line);
    if (status != EVEN_OK || line == NULL) {
      break;
    }
    even_text_clear(&last);
    even_text_add(&last, line);
  }
  even_dialogue_complaint(dialogue, complaint, sizeof complaint);
  if (status == EVEN_OK) {
    status = even_text_status(&last);
  }
  if (status == EVEN_OK && (last.length == 0 || last.data[0] != '{')) {
    status = even_fail(EVEN_ERR_SYSTEM, "%s ended without an answer%s%s", python, complaint[0] == '\0' ? "" : ": ",
                       complaint);
    (void)even_error_fix(
        "`evenstep doctor` says whether that interpreter has torch and evenstep; --python names another");
  } else if (status == EVEN_OK) {
    status = even_json_parse("the answer of a module of Evenstep", even_text_string(&last), last.length, out);
  }
  even_text_free(&last);
  return status;
}

int even_ckpt_python(const char *wish, const char *module, const char *const *words, size_t count, bool as_json) {
  const char *all[EVEN_CKPT_PYTHON_MOST_WORDS + 4] = {NULL, "-m", module};
  even_text python = EVEN_TEXT_EMPTY;
  even_dialogue dialogue;
  json_t *answer = NULL;
  even_status status = count > EVEN_CKPT_PYTHON_MOST_WORDS
                           ? even_fail(EVEN_ERR_USAGE, "%s takes at most %d words", module, EVEN_CKPT_PYTHON_MOST_WORDS)
                           : even_cli_python(wish, &python);
  if (status == EVEN_OK) {
    all[0] = even_text_string(&python);
    memcpy(all + 3, words, count * sizeof *words);
    status = even_dialogue_start((char **)(uintptr_t)all, &dialogue);
  }
  if (status == EVEN_OK) {
    status = hear(&dialogue, even_text_string(&python), &answer);
    even_dialogue_end(&dialogue);
  }
  if (status == EVEN_OK) {
    status = tell(module, as_json, answer);
  }
  int code = status == EVEN_OK ? 0 : even_cli_fail_of(status);
  json_decref(answer);
  even_text_free(&python);
  return code;
}

/* The interpreter that the command's own --python names; NULL: none. */
static const char *wished_python(int argc, char **argv) {
  static const char option[] = "--python";
  for (int i = 0; i < argc && strcmp(argv[i], "--") != 0; i++) {
    if (strncmp(argv[i], option, sizeof option - 1) == 0 && argv[i][sizeof option - 1] == '=') {
      return argv[i] + sizeof option;
    }
    if (strcmp(argv[i], option) == 0 && i + 1 < argc) {
      return argv[i + 1];
    }
  }
  return NULL;
}

int even_ckpt_elsewhere(int argc, char **argv) {
  /* As `-m` would, but what is missing is told as by every other command: exit code 1 means that two differ. */
  static char script[] =
      "import sys\ntry:\n  from evenstep.checkpoint_elsewhere import main\nexcept ImportError as error:\n"
      "  sys.stderr.write(f'evenstep: {sys.executable} cannot do it: {error}\\n  fix: `evenstep doctor` says whether "
      "that interpreter has torch and evenstep; EVENSTEP_PYTHON names another\\n')\n  sys.exit(3)\nmain()";
  enum { WORDS_BEFORE = 4 };
  even_text python = EVEN_TEXT_EMPTY;
  even_text program = EVEN_TEXT_EMPTY;
  char **all = NULL;
  even_status status = EVEN_NEW_ARRAY(&all, (size_t)argc + WORDS_BEFORE + 1);
  if (status == EVEN_OK) {
    status = even_cli_python(wished_python(argc, argv), &python);
  }
  if (status == EVEN_OK) {
    status = even_program_path(&program);
  }
  if (status == EVEN_OK) {
    all[0] = python.data;
    all[1] = (char[]){"-c"};
    all[2] = script;
    all[3] = program.data;
    memcpy((void *)(all + WORDS_BEFORE), (void *)argv, (size_t)argc * sizeof *all);
    all[WORDS_BEFORE + argc] = NULL;
    (void)fflush(NULL);
    (void)execvp(all[0], all);
    status = even_fail_errno(errno, "cannot start %s", all[0]);
  }
  int code = even_cli_fail_of(status);
  even_free((void *)all);
  even_text_free(&program);
  even_text_free(&python);
  return code;
}
