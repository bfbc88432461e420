/* A made-up CUDA driver and NCCL in one library, with streams that run on their own and ranks (threads or processes)
 * that really exchange bytes. Device memory is host memory. It checks what it is asked; a test tells it what to do. */
#ifndef EVEN_TEST_FAKE_GPU_H
#define EVEN_TEST_FAKE_GPU_H

#include <stdbool.h>
#include <stddef.h>

enum { FAKE_DEVICES = 8 };

/* Forgets faults, the log and violations. */
void fake_gpu_reset(void);
/* The nth call (1: the next) of that function of NCCL or the driver returns `result` and does nothing. NULL: none. */
void fake_gpu_fail(const char *function, int nth, int result);
/* The same, of the calling thread's calls alone: the library's own thread calls, too. */
void fake_gpu_fail_here(const char *function, int nth, int result);
/* What ncclCommGetAsyncError says from now on for communicators of that rank; 0: nothing. */
void fake_gpu_async_error(int rank, int result);
/* How often a non-blocking communicator says that a call is still in progress. */
void fake_gpu_polls(int count);
/* While true, operations on streams do not end (an abort ends them). */
void fake_gpu_hang(bool hangs);
/* What ncclGetLastError says with the next failures. */
void fake_gpu_say(const char *words);
/* The first misuse since the reset; "" when there was none. */
const char *fake_gpu_violation(void);
/* Communicators, operations, memory and contexts that were made and not given back. */
int fake_gpu_live(void);
/* Names and numbers of NCCL's calls since the reset: "ncclGroupStart; ncclSend 4 to 1; …". */
const char *fake_gpu_log(void);
/* Whether the log has these words; from any thread. */
bool fake_gpu_was_called(const char *words);
/* Streams of a GPU; the default stream is NULL. */
void *fake_gpu_stream(int device);
void fake_gpu_stream_free(void *stream);
/* Waits until all that is on the stream is done; NULL: the default stream of `device`. */
void fake_gpu_wait(void *stream, int device);
/* What is on the stream, and what comes, stands still while it is held. */
void fake_gpu_hold(void *stream, bool holds);
/* Copies bytes once the stream comes to it. */
void fake_gpu_copy(void *stream, void *to, const void *from, size_t bytes);
/* A mark behind what is on the stream; whether the stream has passed it, and to wait until it has. */
void *fake_gpu_mark(void *stream);
bool fake_gpu_passed(const void *mark);
void fake_gpu_await(void *mark);
void fake_gpu_mark_free(void *mark);
/* Says that the stream captures what is put on it for a graph: nobody may ask for an event of it then. */
void fake_gpu_capture(void *stream, bool captures);

/* between the files of the library */
typedef struct fake_stream fake_stream;
fake_stream *fake_stream_of(void *handle);
int fake_stream_device(const fake_stream *stream);
void fake_stream_put(fake_stream *stream, void (*run)(void *), void *argument);
int fake_current_device(void); /* -1: no context */
bool fake_fails(const char *function, int *result);
void fake_violate(const char *format, ...) __attribute__((format(printf, 1, 2)));
void fake_note(const char *format, ...) __attribute__((format(printf, 1, 2)));
void fake_count(int change);
bool fake_is_hanging(void);

#endif
