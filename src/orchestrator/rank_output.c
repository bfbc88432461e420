/* Reads a rank's pipes: any bytes, lines of any length, streams closed early. */
#include "orchestrator/rank_output.h"

#include "base/fail.h"
#include "os/file.h"
#include "os/pipe.h"

#include <string.h>

enum { LONGEST_LINE = 65536, CHUNK = 16384, MOST_CHUNKS = 256 };

static void give_line(even_rank_stream *stream, const char *text, size_t length) {
  even_rank_output *output = stream->output;
  if (output->call != NULL) {
    output->call(output->context, output->rank, stream->error, text, length);
  }
}

static void end_line(even_rank_stream *stream) {
  if (stream->line.length > 0) {
    give_line(stream, stream->line.data, stream->line.length);
  }
  even_text_clear(&stream->line);
}

static void split(even_rank_stream *stream, const char *data, size_t length) {
  while (length > 0) {
    const char *stop = memchr(data, '\n', length);
    size_t part = stop == NULL ? length : (size_t)(stop - data);
    if (stop != NULL && stream->line.length == 0) {
      give_line(stream, data, part);
    } else {
      even_text_append(&stream->line, data, part);
      if (stop != NULL || stream->line.length >= LONGEST_LINE || even_text_status(&stream->line) != EVEN_OK) {
        end_line(stream);
      }
    }
    data += part + (stop != NULL);
    length -= part + (stop != NULL);
  }
}

static void keep_tail(even_rank_stream *stream, const char *data, size_t length) {
  even_text *tail = &stream->tail;
  if (tail->length + length > 2u * EVEN_RANK_TAIL_BYTES && tail->length > EVEN_RANK_TAIL_BYTES) {
    size_t drop = tail->length - EVEN_RANK_TAIL_BYTES;
    memmove(tail->data, tail->data + drop, EVEN_RANK_TAIL_BYTES);
    tail->length = EVEN_RANK_TAIL_BYTES;
  }
  even_text_append(tail, data, length);
}

static void take(even_rank_stream *stream, const char *data, size_t length) {
  even_rank_output *output = stream->output;
  if (output->log >= 0) {
    even_status status = even_file_write_all(output->log, data, length);
    if (status != EVEN_OK) { /* it must not stop the training; a full disk may have room for what comes later */
      output->log_status = status;
    }
    if (status != EVEN_OK && status != EVEN_ERR_NO_SPACE) {
      even_pipe_close(output->log);
      output->log = -1;
    }
  }
  keep_tail(stream, data, length);
  split(stream, data, length);
}

static void close_stream(even_rank_stream *stream) {
  int fd = stream->watch.fd;
  if (fd >= 0) {
    even_loop_remove(stream->output->loop, &stream->watch);
    even_pipe_close(fd);
    end_line(stream);
  }
}

/* Reads at most one chunk: true when there may be more at once. */
static bool read_some(even_rank_stream *stream) {
  char buffer[CHUNK];
  size_t got = 0;
  switch (even_pipe_read(stream->watch.fd, buffer, sizeof buffer, &got)) {
    case EVEN_PIPE_DATA:
      take(stream, buffer, got);
      return true;
    case EVEN_PIPE_EMPTY:
      return false;
    case EVEN_PIPE_ENDED:
      break;
  }
  close_stream(stream);
  return false;
}

/* All that is there, so that what a rank wrote first to one stream comes before what it wrote then to the other;
 * bounded, so that a rank that never stops does not silence the others. */
static void read_all(even_rank_stream *stream) {
  for (int chunks = 0; stream->watch.fd >= 0 && chunks < MOST_CHUNKS && read_some(stream); chunks++) {
  }
}

static void readable(void *context, int fd) {
  (void)fd;
  read_all(context);
}

even_status even_rank_output_open(even_rank_output *out, even_loop *loop, int rank, int output_fd, int error_fd,
                                  int log, even_line_call *call, void *context) {
  int fds[2] = {output_fd, error_fd};
  *out = (even_rank_output){.loop = loop, .rank = rank, .log = log, .call = call, .context = context};
  even_status status = EVEN_OK;
  for (int i = 0; i < 2; i++) {
    even_rank_stream *stream = &out->streams[i];
    stream->output = out;
    stream->error = i == 1;
    stream->watch.fd = -1;
    if (status == EVEN_OK) {
      status = even_loop_add(loop, &stream->watch, fds[i], readable, stream);
    }
    if (status != EVEN_OK) {
      even_pipe_close(fds[i]);
    }
  }
  return status;
}

void even_rank_output_take(even_rank_output *output, int stream, const char *data, size_t length) {
  if (length > 0) {
    take(&output->streams[stream], data, length);
  }
}

void even_rank_output_finish(even_rank_output *output) {
  for (int i = 0; i < 2; i++) {
    even_rank_stream *stream = &output->streams[i];
    read_all(stream); /* never waited for: a process that outlives the rank may hold the pipe open */
    close_stream(stream);
    even_text_free(&stream->line);
  }
  if (output->log >= 0) {
    even_pipe_close(output->log);
    output->log = -1;
  }
}

void even_rank_output_close(even_rank_output *output) {
  even_rank_output_finish(output);
  even_text_free(&output->streams[0].tail);
  even_text_free(&output->streams[1].tail);
}
