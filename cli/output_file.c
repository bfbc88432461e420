/* Whether a command's result can be written where it is to go, asked before the minutes that it takes to have one. */
#include "base/fail.h"
#include "base/text.h"
#include "cli/command.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/thread.h"

#include <string.h>

/* Of /dev/stdout, which may lead to a file, the name itself would be replaced: no program had it again. */
static bool is_of_the_system(const char *path) {
  return even_path_is_special(path) || (strncmp(path, "/dev/", 5) == 0 && strncmp(path, "/dev/shm/", 9) != 0);
}

static even_status try_beside(const char *path) {
  even_text beside = EVEN_TEXT_EMPTY;
  even_text_format(&beside, "%s.%ld", path, (long)even_own_process());
  even_status status = even_text_status(&beside);
  if (status == EVEN_OK) {
    status = even_file_replace(even_text_string(&beside), "", 0);
  }
  if (status == EVEN_OK) {
    status = even_file_remove(even_text_string(&beside));
  }
  even_text_free(&beside);
  return status;
}

even_status even_cli_check_output(const char *path) {
  if (path == NULL) {
    return EVEN_OK;
  }
  if (even_path_is_folder(path)) {
    (void)even_fail(EVEN_ERR_INPUT, "%s is a folder, where the result is to be a file", path);
    return even_error_fix("give a file's name behind it: %s/NAME", path);
  }
  if (is_of_the_system(path)) {
    (void)even_fail(EVEN_ERR_INPUT, "%s is a device, a pipe or a socket, which a file would take the place of", path);
    return even_error_fix("give a file's name; --json prints the result on standard output");
  }
  if (try_beside(path) != EVEN_OK) {
    return even_error_fix("give a file in a folder that is there and may be written to; nothing was begun yet");
  }
  return EVEN_OK;
}
