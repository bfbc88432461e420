/* Collectives from C, without Python: two processes add up their arrays in shared memory.
 *   cc all_reduce.c $(pkg-config --cflags --libs evenstep) -o all_reduce && ./all_reduce */
#include <evenstep/evenstep.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANKS 2
#define COUNT 256

static int complain(void) {
  const even_error *error = even_error_last();
  (void)fprintf(stderr, "%s\n  fix: %s\n", error->what, error->fix);
  return even_status_exit_code(error->status);
}

static int run_rank(const even_comm_params *params, int fd) {
  even_comm *comm = NULL;
  if (even_comm_open(params, fd, &comm) != EVEN_OK) { /* returns when all ranks have come */
    return complain();
  }
  float *data = even_comm_arena(comm); /* memory of the group: nothing is copied on the way */
  for (int i = 0; i < COUNT; i++) {
    data[i] = (float)(params->rank + 1);
  }
  int failed = 0;
  if (even_comm_all_reduce(comm, data, COUNT, EVEN_F32, EVEN_SUM) != EVEN_OK) {
    failed = complain();
  } else {
    (void)printf("rank %d of %d: %d sums, each %g\n", even_comm_rank(comm), even_comm_ranks(comm), COUNT, data[0]);
  }
  even_comm_close(comm);
  return failed;
}

int main(void) {
  even_comm_params params = {
      .size = sizeof params, .ranks = RANKS, .arena_bytes = COUNT * sizeof(float), .timeout_seconds = 30, .spin = -1};
  int fd = -1;
  if (even_comm_create_segment(&params, &fd) != EVEN_OK) {
    return complain();
  }
  pid_t child = fork(); /* it inherits the descriptor, before either has opened the group */
  if (child < 0) {
    perror("fork");
    return 1;
  }
  params.rank = child == 0 ? 1 : 0;
  int failed = run_rank(&params, fd);
  int ended = 0;
  if (child > 0 && waitpid(child, &ended, 0) == child && ended != 0) {
    failed = 1;
  }
  return failed;
}
