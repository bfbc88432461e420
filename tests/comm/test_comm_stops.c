/* Ranks that are stopped or killed while others are inside a call: who is named, and what is left behind. */
#include "comm/group.h"
#include "comm/ranks.h"

#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define FLOATS ((size_t)100000)
#define RANKS 3

/* What a rank does until something fails. */
typedef even_status rank_work(even_comm *comm, size_t round, float *plain);

static even_status reduce(even_comm *comm, size_t round, float *plain) {
  static const size_t sizes[] = {16, 5000, FLOATS};
  return even_comm_all_reduce(comm, round % 2 == 0 ? plain : even_comm_arena(comm), sizes[round % 3], EVEN_F32,
                              EVEN_MAX);
}

/* A message to the next rank and one from the one before. */
static even_status pass_on(even_comm *comm, size_t round, float *plain) {
  int own = even_comm_rank(comm);
  size_t bytes = round % 2 == 0 ? 64 : FLOATS * sizeof(float);
  even_comm_request *out = NULL;
  even_comm_request *in = NULL;
  even_status status = even_comm_send_begin(comm, plain, bytes, (own + 1) % RANKS, 1, &out);
  if (status == EVEN_OK) {
    status = even_comm_receive_begin(comm, even_comm_arena(comm), bytes, (own + RANKS - 1) % RANKS, 1, &in);
  }
  status = status == EVEN_OK ? even_comm_request_wait(in, 0, NULL) : status;
  return status == EVEN_OK ? even_comm_request_wait(out, 0, NULL) : status;
}

/* 0 where it ended with the loss of rank 1, in the words wanted. */
static int work_and_expect(even_comm *comm, rank_work *work, int ready, const char *words) {
  float *plain = calloc(FLOATS, sizeof *plain);
  even_status status = write(ready, "r", 1) == 1 ? EVEN_OK : EVEN_ERR_SYSTEM;
  for (size_t round = 0; status == EVEN_OK; round++) {
    status = work(comm, round, plain);
  }
  free(plain);
  RANKS_EXPECT(comm, status == EVEN_ERR_PEER_LOST && even_error_last()->rank == 1);
  RANKS_EXPECT(comm, strstr(even_error_last()->what, words) != NULL && even_error_last()->fix[0] != '\0');
  return 0;
}

/* Those whose names begin so: other tests have theirs in /dev/shm meanwhile. */
static int entries_of(const char *path, const char *prefix) {
  int count = 0;
  DIR *folder = opendir(path);
  const struct dirent *entry = NULL;
  while (folder != NULL && (entry = readdir(folder)) != NULL) {
    count += strncmp(entry->d_name, prefix, strlen(prefix)) == 0;
  }
  if (folder != NULL) {
    (void)closedir(folder);
  }
  return count;
}

/* Signals rank 1 of three while they work; the others must name it. The moment is any: it decides nothing. */
static void signal_a_rank_at_work(int number, rank_work *work, const char *words, unsigned moment) {
  int pipe_ends[2];
  int fd = -1;
  pid_t processes[RANKS];
  even_comm_params params = {
      .size = sizeof params, .ranks = RANKS, .arena_bytes = FLOATS * sizeof(float), .timeout_seconds = 60, .spin = -1};
  assert_int_equal(even_comm_create_segment(&params, &fd), EVEN_OK);
  assert_int_equal(pipe(pipe_ends), 0);
  for (int rank = 0; rank < RANKS; rank++) {
    processes[rank] = fork();
    if (processes[rank] == 0) {
      even_comm *comm = NULL;
      (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* ends also where the test fails */
      params.rank = rank;
      _exit(even_comm_open(&params, fd, &comm) != EVEN_OK ? 98 : work_and_expect(comm, work, pipe_ends[1], words));
    }
  }
  (void)close(fd);
  (void)close(pipe_ends[1]);
  for (int ready = 0; ready < RANKS; ready++) {
    char byte;
    assert_int_equal(read(pipe_ends[0], &byte, 1), 1);
  }
  (void)usleep(moment);
  assert_int_equal(kill(processes[1], number), 0);
  for (int rank = 0; rank < RANKS; rank += 2) {
    int status = 0;
    (void)waitpid(processes[rank], &status, 0);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  (void)kill(processes[1], SIGKILL);
  (void)waitpid(processes[1], NULL, 0);
  (void)close(pipe_ends[0]);
}

static void repeat(int number, const char *words) {
  int descriptors = entries_of("/proc/self/fd", "");
  int shared = entries_of("/dev/shm", "evenstep-group");
  for (unsigned i = 0; i < 5; i++) {
    signal_a_rank_at_work(number, reduce, words, i * 7919 % 20000);
    signal_a_rank_at_work(number, pass_on, words, i * 5077 % 20000);
  }
  assert_int_equal(entries_of("/proc/self/fd", ""), descriptors);
  assert_int_equal(entries_of("/dev/shm", "evenstep-group"), shared);
}

static void a_stopped_rank_is_named(void **state) {
  (void)state;
  repeat(SIGSTOP, "was stopped (SIGSTOP, SIGTSTP) and stands still");
}

static void a_killed_rank_is_named(void **state) {
  (void)state;
  repeat(SIGKILL, "died");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_stopped_rank_is_named),
      cmocka_unit_test(a_killed_rank_is_named),
  };
  return cmocka_run_group_tests_name("ranks stopped or killed in a call", tests, NULL, NULL);
}
