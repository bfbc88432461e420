/* What a rank prints: all of it to its log, line by line to whoever watches, the last of it kept for the
 * cause of its end. */
#ifndef EVEN_ORCHESTRATOR_RANK_OUTPUT_H
#define EVEN_ORCHESTRATOR_RANK_OUTPUT_H

#include "base/text.h"
#include "os/loop.h"

#include <stdbool.h>

typedef void even_line_call(void *context, int rank, bool error, const char *text, size_t length);

typedef struct even_rank_output even_rank_output;

typedef struct even_rank_stream {
  even_rank_output *output;
  even_loop_watch watch;
  bool error;
  even_text line; /* begun, not yet ended */
  even_text tail; /* the last bytes */
} even_rank_stream;

struct even_rank_output {
  even_loop *loop;
  int rank;
  int log; /* -1: none, or it could not be written */
  even_status log_status;
  even_line_call *call; /* may be NULL */
  void *context;
  even_rank_stream streams[2]; /* stdout, stderr */
};

/* Begins to read both descriptors (owned from now on, also on failure) in `loop`; appends to `log` (owned too; -1:
 * none). `out` must stay in place until closed. */
even_status even_rank_output_open(even_rank_output *out, even_loop *loop, int rank, int output_fd, int error_fd,
                                  int log, even_line_call *call, void *context) EVEN_MUST_USE;
/* What a stream (0: output, 1: error) had said before it was read here. */
void even_rank_output_take(even_rank_output *output, int stream, const char *data, size_t length);
/* Reads what is still there without waiting, gives the last unended lines out, closes the descriptors. The tails stay.
 */
void even_rank_output_finish(even_rank_output *output);
/* Frees the tails too. */
void even_rank_output_close(even_rank_output *output);
/* The last bytes of a stream: so many at least where there were as many, up to twice as many. */
enum { EVEN_RANK_TAIL_BYTES = 16384 };

#endif
