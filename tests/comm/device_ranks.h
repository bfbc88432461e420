/* Ranks of device communicators as threads of one process, each on a made-up GPU with a stream of its own. */
#ifndef EVEN_TEST_DEVICE_RANKS_H
#define EVEN_TEST_DEVICE_RANKS_H

#include <evenstep/device_comm.h>

#define DEVICE_RANKS_MOST 8

typedef struct device_rank {
  even_device_comm *comm;
  void *stream;
  int rank, ranks;
  void *argument;
} device_rank;

typedef struct device_setup {
  int ranks;
  bool blocking;
  const int *numbers; /* what the ranks are called; NULL: as they are */
  double timeout_seconds;
} device_setup;

/* What a rank does; 0 where all was right. */
typedef int device_body(device_rank *rank);

/* Opens one communicator a rank, runs `body`, waits for the streams, closes. Returns how many ranks went wrong. */
int device_ranks_run(const device_setup *setup, device_body *body, void *argument);
/* Waits for what the rank has put on its stream. */
void device_rank_wait(device_rank *rank);
/* One rank's communicator with its stream, opened by the calling thread; close it with device_rank_end. */
even_status device_rank_begin(const device_setup *setup, int rank, const even_device_comm_id *id, device_rank *out);
even_status device_rank_end(device_rank *rank);

/* For the setup and teardown of each test: the made-up libraries are chosen and reset; nothing is misused or left. */
int device_test_begin(void **state);
int device_test_end(void **state);

int device_complain(const device_rank *rank, const char *file, int line, const char *what);
#define DEVICE_EXPECT(rank, condition)                                \
  do {                                                                \
    if (!(condition)) {                                               \
      return device_complain((rank), __FILE__, __LINE__, #condition); \
    }                                                                 \
  } while (0)

#endif
