/* How the library reports an error: one call where the cause is known, one
 * more, optional, where the user's intent (and so the fix) is known. */
#ifndef EVEN_BASE_FAIL_H
#define EVEN_BASE_FAIL_H

#include <evenstep/status.h>

/* Records an error for the calling thread and returns its status:
 *   return even_fail(EVEN_ERR_INPUT, "%s: line %d is not JSON", path, line); */
#define even_fail(status, ...) even_fail_at(__FILE__, __LINE__, (status), 0, __VA_ARGS__)

/* The same for a failed system call; the text of `error_number` is appended,
 * and the status is derived from it (ENOSPC, ENOMEM, EACCES, EADDRINUSE, ENOENT …
 * have their own), EVEN_ERR_SYSTEM otherwise. */
#define even_fail_errno(error_number, ...) even_fail_errno_at(__FILE__, __LINE__, (error_number), __VA_ARGS__)

even_status even_fail_at(const char *file, int line, even_status status, int system_error, const char *format, ...)
    EVEN_PRINTF(5, 6);
even_status even_fail_errno_at(const char *file, int line, int system_error, const char *format, ...) EVEN_PRINTF(4, 5);

/* Adds the advice to the last error; an advice already there is kept. Returns its status. */
even_status even_error_fix(const char *format, ...) EVEN_PRINTF(1, 2);
/* Names the rank (-1: leave) and the device (NULL: leave) of the last error. */
even_status even_error_place(int rank, const char *device);
/* Gives the last error this status: its words, and the system error, stay. Returns it. */
even_status even_error_means(even_status status);
/* Puts "prefix: " before the last error's text. */
even_status even_error_prefix(const char *format, ...) EVEN_PRINTF(1, 2);

/* The words for `status`: the calling thread's last error where that is of this status, else (a function failed without
 * saying why, or another call failed since) the table's text, which becomes the last error. Never NULL. */
const even_error *even_error_of(even_status status);

/* Around a call of a function of the caller's: what was recorded before it is put aside, so that it is not taken for
 * the words of a function that fails with the same status and records nothing; where it returns EVEN_OK it is put back.
 * Returns what the function has returned. */
even_error even_error_aside(void);
even_status even_error_told(even_status status, const even_error *aside);

/* Makes `error`, recorded on another thread, the calling thread's last error. Returns its status. */
even_status even_error_restore(const even_error *error);

/* Leaves the function when `call` fails. */
#define EVEN_TRY(call)                     \
  do {                                     \
    even_status even_try_status_ = (call); \
    if (even_try_status_ != EVEN_OK) {     \
      return even_try_status_;             \
    }                                      \
  } while (0)

#endif
