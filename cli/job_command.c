/* Finds the interpreter and checks the script before any rank starts. */
#include "base/alloc.h"
#include "base/fail.h"
#include "cli/job_setup.h"
#include "cli/python.h"
#include "orchestrator/outlast.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/path.h"

#include <stdlib.h>
#include <string.h>

static bool starts(const even_text *text, const char *prefix) {
  return text->length >= strlen(prefix) && memcmp(text->data, prefix, strlen(prefix)) == 0;
}

/* A program given where a Python script is expected would end in a riddle of syntax errors. */
static bool is_another_program(const even_text *start) {
  if (starts(start,
             "\x7f"
             "ELF")) {
    return true;
  }
  if (!starts(start, "#!")) {
    return false;
  }
  size_t line = 0;
  while (line < start->length && start->data[line] != '\n') {
    line++;
  }
  return memmem(start->data, line, "python", 6) == NULL;
}

/* Python runs the __main__.py of a folder. */
static even_status check_folder(const char *path) {
  even_text main = EVEN_TEXT_EMPTY;
  even_text_format(&main, "%s/__main__.py", path);
  even_status status = even_text_status(&main);
  if (status == EVEN_OK && !even_path_exists(main.data)) {
    status = even_fail(EVEN_ERR_INPUT, "%s is a folder without a __main__.py, not a script", path);
    (void)even_error_fix("name the script in it");
  }
  even_text_free(&main);
  return status;
}

static even_status check_script(const char *path) {
  even_text start = EVEN_TEXT_EMPTY;
  if (!even_path_exists(path)) {
    even_status status = even_fail(EVEN_ERR_NOT_FOUND, "script %s does not exist", path);
    (void)even_error_fix("check the path; it is looked for from the working folder (-m for a module)");
    return status;
  }
  if (!even_file_readable(path)) {
    even_status status = even_fail(EVEN_ERR_PERMISSION, "script %s cannot be read", path);
    (void)even_error_fix("chmod +r %s", path);
    return status;
  }
  if (even_path_is_folder(path)) {
    return check_folder(path);
  }
  even_status status = even_file_start(path, 256, &start);
  if (status == EVEN_OK && is_another_program(&start)) {
    status = even_fail(EVEN_ERR_INPUT, "%s is not a Python script", path);
    (void)even_error_fix("run a program that is not Python with --no-python");
  }
  even_text_free(&start);
  return status;
}

even_status even_job_command(const even_job_options *options, size_t count, char **words, even_job_setup *setup) {
  size_t at = 0;
  if (options->module && options->no_python) {
    return even_fail(EVEN_ERR_USAGE, "-m and --no-python do not go together");
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&setup->command, count + 4));
  if (!options->no_python) {
    if (!options->module && !even_outlast_due(options->legacy)) { /* which has read it, and it may be gone since */
      EVEN_TRY(check_script(words[0]));
    }
    EVEN_TRY(even_cli_python(options->python, &setup->python));
    setup->command[at++] = setup->python.data;
    setup->command[at++] = (char *)"-u";
    if (options->module) {
      setup->command[at++] = (char *)"-m";
    }
  }
  memcpy(&setup->command[at], words, count * sizeof *words);
  return EVEN_OK;
}
