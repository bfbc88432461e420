/* Finds the interpreter. */
#include "cli/python.h"

#include "base/fail.h"
#include "os/path.h"

#include <stdlib.h>
#include <string.h>

static even_status python_beside_us(even_text *out) {
  static const char *const names[] = {"python3", "python"};
  even_text program = EVEN_TEXT_EMPTY;
  EVEN_TRY(even_program_path(&program));
  size_t folder = (size_t)(strrchr(program.data, '/') + 1 - program.data);
  for (size_t i = 0; i < 2 && out->length == 0; i++) {
    even_text_append(out, program.data, folder);
    even_text_add(out, names[i]);
    if (even_text_status(out) == EVEN_OK && !even_file_executable(out->data)) {
      even_text_clear(out);
    }
  }
  even_text_free(&program);
  return even_text_status(out);
}

even_status even_cli_python(const char *wish, even_text *out) {
  const char *variable = getenv("EVENSTEP_PYTHON");
  even_text_clear(out);
  if (wish != NULL) {
    even_text_add(out, wish);
    if (strchr(wish, '/') != NULL && !even_file_executable(wish)) {
      even_status status = even_fail(EVEN_ERR_NOT_FOUND, "--python %s is no executable file", wish);
      (void)even_error_fix("name a Python interpreter, or leave --python out");
      return status;
    }
    return even_text_status(out);
  }
  const char *main_python = getenv("EVENSTEP_MAIN_PYTHON");
  if (main_python != NULL && main_python[0] != '\0') {
    even_text_add(out, main_python);
    return even_text_status(out);
  }
  EVEN_TRY(python_beside_us(out));
  if (out->length == 0) {
    even_text_add(out, variable != NULL && variable[0] != '\0' ? variable : "python3");
  }
  return even_text_status(out);
}
