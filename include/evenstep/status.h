/* Status codes and the error record: what every fallible function of Evenstep
 * returns, and where the words for it are found. */
#ifndef EVENSTEP_STATUS_H
#define EVENSTEP_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define EVEN_PRINTF(format_index, first_argument) __attribute__((format(printf, format_index, first_argument)))
#define EVEN_PUBLIC __attribute__((visibility("default")))
#define EVEN_MUST_USE __attribute__((warn_unused_result))
#else
#define EVEN_PRINTF(format_index, first_argument)
#define EVEN_PUBLIC
#define EVEN_MUST_USE
#endif

/* One table for all errors: X(name, number, exit code of the program, text).
 * Numbers and exit codes are stable: they never change their meaning. */
#define EVEN_STATUS_LIST(X)                                                   \
  X(OK, 0, 0, "success")                                                      \
  X(ERR_USAGE, 1, 2, "the command or call was used wrongly")                  \
  X(ERR_ARGUMENT, 2, 2, "an argument is outside its range")                   \
  X(ERR_INPUT, 3, 3, "a file or value given as input is not valid")           \
  X(ERR_NOT_FOUND, 4, 3, "something named does not exist")                    \
  X(ERR_DEVICE, 5, 4, "a device does not exist or does not work")             \
  X(ERR_MEMORY, 6, 5, "memory could not be had")                              \
  X(ERR_SYSTEM, 7, 5, "a call to the operating system failed")                \
  X(ERR_NO_SPACE, 8, 5, "the disk or the shared memory is full")              \
  X(ERR_IN_USE, 9, 5, "a port, file or name is in use")                       \
  X(ERR_PERMISSION, 10, 5, "the operating system forbids it")                 \
  X(ERR_CORRUPT, 11, 6, "stored data is damaged")                             \
  X(ERR_PEER_LOST, 12, 7, "another rank died")                                \
  X(ERR_REVOKED, 13, 7, "the generation of this group was revoked")           \
  X(ERR_TIMEOUT, 14, 7, "a wait ended by its time limit")                     \
  X(ERR_MISMATCH, 15, 7, "ranks disagree about what they do")                 \
  X(ERR_RANK_FAILED, 16, 7, "a rank failed and no restart was left")          \
  X(ERR_UNSUPPORTED, 17, 8, "this build, machine or version cannot do it")    \
  X(ERR_OVERFLOW, 18, 3, "a size or count does not fit its type")             \
  X(ERR_STATE, 19, 9, "the call came at a moment at which it is not allowed") \
  X(ERR_INTERRUPTED, 20, 130, "interrupted by the user")

typedef enum even_status {
#define EVEN_STATUS_ENUM(name, number, exit_code, text) EVEN_##name = (number),
  EVEN_STATUS_LIST(EVEN_STATUS_ENUM)
#undef EVEN_STATUS_ENUM
} even_status;

/* What went wrong last on the calling thread. Fixed size: writing it never fails. */
typedef struct even_error {
  even_status status;
  int system_error; /* errno of the failed call, 0 where there was none */
  int rank;         /* -1 where the error belongs to no rank */
  int line;         /* and `file`: where in the library it was found; for bug reports */
  const char *file; /* a static string, NULL where there was none */
  char device[32];  /* "cpu:0", "cuda:1", empty where the error belongs to none */
  char what[640];   /* what happened, where and why, one line */
  char fix[384];    /* what to do about it, one line, may be empty */
} even_error;

/* "EVEN_ERR_INPUT"; a static string, never NULL. Any thread. */
EVEN_PUBLIC const char *even_status_name(even_status status);
/* The table's text for a status; a static string, never NULL. Any thread. */
EVEN_PUBLIC const char *even_status_text(even_status status);
/* The exit code with which `evenstep` ends for this status. Any thread. */
EVEN_PUBLIC int even_status_exit_code(even_status status);

/* The last error of the calling thread; valid until its next failing call. Never NULL. */
EVEN_PUBLIC const even_error *even_error_last(void);
/* Forgets the calling thread's last error. */
EVEN_PUBLIC void even_error_clear(void);

#ifdef __cplusplus
}
#endif
#endif
