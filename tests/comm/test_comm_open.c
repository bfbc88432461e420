/* Opening groups: what is refused and why, and that every failed system call or allocation is survived without a leak.
 */
#include "base/alloc.h"
#include "comm/ranks.h"
#include "comm/segment.h"
#include "os/calls.h"
#include "os/shared_memory.h"
#include "support/descriptors.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static even_comm_params params_of(int ranks, size_t arena_bytes) {
  return (even_comm_params){
      .size = sizeof(even_comm_params), .ranks = ranks, .arena_bytes = arena_bytes, .timeout_seconds = 0.05, .spin = 0};
}

static void test_bad_parameters(void **state) {
  int fd = 5;
  even_comm *comm = NULL;
  even_comm_params params = params_of(0, 0);
  (void)state;
  assert_int_equal(even_comm_create_segment(&params, &fd), EVEN_ERR_ARGUMENT);
  assert_int_equal(fd, -1);
  params.ranks = 5000;
  assert_int_equal(even_comm_create_segment(&params, &fd), EVEN_ERR_ARGUMENT);
  params = params_of(4096, SIZE_MAX / 2);
  assert_int_equal(even_comm_create_segment(&params, &fd), EVEN_ERR_OVERFLOW);
  params = params_of(1, SIZE_MAX);
  assert_int_equal(even_comm_create_segment(&params, &fd), EVEN_ERR_OVERFLOW);
  params = params_of(2, 64);
  params.size = 3;
  assert_int_equal(even_comm_create_segment(&params, &fd), EVEN_ERR_ARGUMENT);
  params = params_of(2, 64);
  params.rank = 2;
  assert_int_equal(even_comm_open(&params, 0, &comm), EVEN_ERR_ARGUMENT);
  params.rank = -1;
  assert_int_equal(even_comm_open(&params, 0, &comm), EVEN_ERR_ARGUMENT);
  assert_null(comm);
  even_comm_close(NULL);
}

static void test_what_is_no_segment(void **state) {
  even_comm_params params = params_of(1, 64);
  even_comm *comm = NULL;
  (void)state;
  assert_int_not_equal(even_comm_open(&params, -1, &comm), EVEN_OK);
  even_shared_memory memory;
  assert_int_equal(even_shared_memory_create("zeros", 1 << 20, &memory), EVEN_OK);
  assert_int_equal(even_comm_open(&params, memory.fd, &comm), EVEN_ERR_INPUT);
  even_shared_memory_close(&memory);
  assert_int_equal(even_shared_memory_create("short", 64, &memory), EVEN_OK);
  assert_int_equal(even_comm_open(&params, memory.fd, &comm), EVEN_ERR_INPUT);
  even_shared_memory_close(&memory);
}

static void test_segments_of_others(void **state) {
  even_comm_params params = params_of(2, 64);
  even_comm *comm = NULL;
  int fd = -1;
  (void)state;
  assert_int_equal(even_comm_create_segment(&params, &fd), EVEN_OK);
  params = params_of(3, 64);
  assert_int_equal(even_comm_open(&params, fd, &comm), EVEN_ERR_MISMATCH);
  assert_non_null(strstr(even_error_last()->what, "made for 2 ranks with arenas of 64 bytes"));
  params = params_of(2, 65);
  assert_int_equal(even_comm_open(&params, fd, &comm), EVEN_ERR_MISMATCH);
  even_comm_header *header = mmap(NULL, sizeof *header, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  params = params_of(2, 64);
  header->version = 99;
  assert_int_equal(even_comm_open(&params, fd, &comm), EVEN_ERR_UNSUPPORTED);
  header->version = EVEN_COMM_VERSION;
  /* nobody else comes */
  assert_int_equal(even_comm_open(&params, fd, &comm), EVEN_ERR_TIMEOUT);
  /* and that rank has been taken */
  assert_int_equal(even_comm_open(&params, fd, &comm), EVEN_ERR_IN_USE);
  assert_int_equal(ftruncate(fd, 8192), -1); /* its size is sealed */
  int cut = memfd_create("cut", MFD_CLOEXEC);
  assert_int_equal(ftruncate(cut, 8192), 0);
  assert_int_equal(pwrite(cut, header, sizeof *header, 0), sizeof *header);
  params.rank = 1;
  assert_int_equal(even_comm_open(&params, cut, &comm), EVEN_ERR_INPUT);
  (void)close(cut);
  (void)munmap(header, sizeof *header);
  (void)close(fd);
}

static void test_it_says_how_it_moves_data(void **state) {
  even_comm *comm = ranks_open_alone(4096);
  char text[512];
  char cut[8];
  (void)state;
  even_comm_describe(comm, text, sizeof text);
  assert_non_null(strstr(text, "shared memory, 1 ranks, "));
  assert_non_null(strstr(text, even_comm_simd()));
  assert_non_null(strstr(text, "staged in pieces of 256 KB"));
  even_comm_describe(comm, cut, sizeof cut);
  assert_string_equal(cut, "shared ");
  even_comm_close(comm);
}

static void test_arguments_of_calls(void **state) {
  even_comm *comm = ranks_open_alone(4096);
  double data[4] = {1, 2, 3, 4};
  size_t counts[1] = {4};
  size_t huge[1] = {SIZE_MAX / 4};
  size_t more_than_memory[1] = {SIZE_MAX};
  const void *parts[1] = {data};
  const void *nothing[1] = {NULL};
  void *outputs[1] = {data + 2};
  (void)state;
  assert_int_equal(even_comm_all_reduce(comm, data, 4, (even_dtype)99, EVEN_SUM), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_comm_all_reduce(comm, data, 4, EVEN_F8E4M3, EVEN_SUM), EVEN_ERR_ARGUMENT); /* GPUs alone */
  assert_int_equal(even_comm_all_reduce(comm, data, 4, EVEN_F64, (even_reduce_op)8), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_comm_all_reduce(comm, data, 4, EVEN_I32, EVEN_AVG), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_comm_all_reduce(comm, data, 4, EVEN_F64, EVEN_BXOR), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_comm_all_reduce(comm, NULL, 4, EVEN_F64, EVEN_SUM), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_comm_all_reduce(comm, (char *)data + 1, 2, EVEN_F64, EVEN_SUM), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_comm_all_reduce(comm, data, SIZE_MAX / 4, EVEN_F64, EVEN_SUM), EVEN_ERR_OVERFLOW);
  assert_int_equal(even_comm_all_gather(comm, data, data, huge, EVEN_F64), EVEN_ERR_OVERFLOW);
  assert_int_equal(even_comm_all_to_all(comm, parts, more_than_memory, outputs, counts), EVEN_ERR_OVERFLOW);
  assert_int_equal(even_comm_all_to_all(comm, nothing, counts, outputs, counts), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_comm_all_to_all(comm, parts, counts, NULL, counts), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_comm_broadcast(comm, data, 8, 1), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_comm_broadcast(comm, data, 8, -1), EVEN_ERR_ARGUMENT);
  /* none of it harmed the group */
  assert_int_equal(even_comm_all_reduce(comm, data, 4, EVEN_F64, EVEN_AVG), EVEN_OK);
  assert_int_equal(even_comm_all_reduce(comm, NULL, 0, EVEN_F64, EVEN_SUM), EVEN_OK);
  double output[4] = {0};
  assert_int_equal(even_comm_reduce_scatter(comm, data, output, counts, EVEN_F64, EVEN_SUM), EVEN_OK);
  assert_memory_equal(data, output, sizeof data);
  assert_true((uintptr_t)even_comm_arena(comm) % 64 == 0);
  even_comm_leave(comm);
  assert_int_equal(even_comm_barrier(comm), EVEN_ERR_STATE);
  even_comm_close(comm);
  comm = ranks_open_alone(0);
  assert_null(even_comm_arena(comm));
  even_comm_close(comm);
}

/* Rank 1 ends before it opens the group; the time limit is long. */
static void test_one_that_never_comes_is_named(void **state) {
  even_comm_params params = params_of(2, 64);
  even_comm *comm = NULL;
  long processes[2] = {0};
  int fd = -1;
  (void)state;
  params.timeout_seconds = 600;
  processes[1] = (long)fork();
  if (processes[1] == 0) {
    _exit(0);
  }
  (void)waitpid((pid_t)processes[1], NULL, 0);
  assert_int_equal(even_comm_create_segment_for(&params, processes, &fd), EVEN_OK);
  assert_int_equal(even_comm_open(&params, fd, &comm), EVEN_ERR_PEER_LOST);
  assert_int_equal(even_error_last()->rank, 1);
  assert_non_null(strstr(even_error_last()->what, "opening the group"));
  assert_null(comm);
  (void)close(fd);
}

/* ---- faults ---- */

static int calls_left; /* the call after so many fails */

static bool fails(void) {
  return calls_left-- == 0;
}
static int failing_memfd_create(const char *name, unsigned int flags) {
  return fails() ? (errno = EMFILE, -1) : even_os_real.memfd_create(name, flags);
}
static int failing_ftruncate(int fd, off_t length) {
  return fails() ? (errno = EIO, -1) : even_os_real.ftruncate(fd, length);
}
static void *failing_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  return fails() ? (errno = ENOMEM, MAP_FAILED) : even_os_real.mmap(address, bytes, protection, flags, fd, offset);
}
static int failing_open(const char *path, int flags, mode_t mode) {
  return fails() ? (errno = EMFILE, -1) : even_os_real.open(path, flags, mode);
}
static int failing_fstat(int fd, struct stat *out) {
  return fails() ? (errno = EIO, -1) : even_os_real.fstat(fd, out);
}
static ssize_t failing_read(int fd, void *buffer, size_t bytes) {
  return fails() ? (errno = EIO, -1) : even_os_real.read(fd, buffer, bytes);
}
static void *failing_allocate(size_t bytes) {
  return fails() ? NULL : malloc(bytes);
}
static void *failing_reallocate(void *pointer, size_t bytes) {
  return fails() ? NULL : realloc(pointer, bytes);
}

static int count_mappings(void) {
  int count = 0;
  char line[512];
  FILE *maps = fopen("/proc/self/maps", "r");
  while (fgets(line, sizeof line, maps) != NULL) {
    count += strstr(line, "evenstep-group") != NULL;
  }
  (void)fclose(maps);
  return count;
}

static even_status make_and_open(void) {
  even_comm_params params = params_of(1, 4096);
  even_comm *comm = NULL;
  int fd = -1;
  even_status status = even_comm_create_segment(&params, &fd);
  if (status == EVEN_OK) {
    status = even_comm_open(&params, fd, &comm);
    (void)close(fd);
  }
  even_comm_close(comm);
  return status;
}

static void inject(const char *what) {
  even_allocator kept = even_allocator_current;
  if (strcmp(what, "memfd_create") == 0) {
    even_os.memfd_create = failing_memfd_create;
  } else if (strcmp(what, "ftruncate") == 0) {
    even_os.ftruncate = failing_ftruncate;
  } else if (strcmp(what, "mmap") == 0) {
    even_os.mmap = failing_mmap;
  } else if (strcmp(what, "open") == 0) {
    even_os.open = failing_open;
  } else if (strcmp(what, "fstat") == 0) {
    even_os.fstat = failing_fstat;
  } else if (strcmp(what, "read") == 0) {
    even_os.read = failing_read;
  } else {
    even_allocator_current = (even_allocator){failing_allocate, failing_reallocate, free};
  }
  int descriptors = open_descriptors();
  int failures = 0;
  for (int nth = 0; nth < 100; nth++) {
    calls_left = nth;
    even_status status = make_and_open();
    assert_int_equal(open_descriptors(), descriptors);
    assert_int_equal(count_mappings(), 0);
    if (status == EVEN_OK) {
      break;
    }
    assert_true(even_error_last()->what[0] != '\0');
    failures++;
  }
  even_os = even_os_real;
  even_allocator_current = kept;
  assert_true(failures > 0 && failures < 100);
}

/* A rank whose opening failed can be opened again, by this process or another. */
static void test_a_failed_opening_leaves_the_rank_free(void **state) {
  even_comm_params params = params_of(1, 4096);
  int failures = 0;
  (void)state;
  for (int way = 0; way < 2; way++) {
    even_comm *comm = NULL;
    int fd = -1;
    even_status status = EVEN_ERR_SYSTEM;
    assert_int_equal(even_comm_create_segment(&params, &fd), EVEN_OK);
    for (int nth = 0; nth < 100 && status != EVEN_OK; nth++) {
      calls_left = nth;
      even_os.open = way == 0 ? failing_open : even_os_real.open;
      even_os.read = way == 1 ? failing_read : even_os_real.read;
      status = even_comm_open(&params, fd, &comm);
      even_os = even_os_real;
      assert_int_not_equal(status, EVEN_ERR_IN_USE);
      failures += status != EVEN_OK;
    }
    assert_int_equal(status, EVEN_OK);
    even_comm_close(comm);
    (void)close(fd);
  }
  assert_true(failures >= 4); /* the process, and its CPUs */
}

static void test_every_failed_call_is_survived(void **state) {
  static const char *const calls[] = {"memfd_create", "ftruncate", "mmap", "open", "fstat", "read", "allocate"};
  (void)state;
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    inject(calls[i]);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_bad_parameters),
      cmocka_unit_test(test_what_is_no_segment),
      cmocka_unit_test(test_segments_of_others),
      cmocka_unit_test(test_it_says_how_it_moves_data),
      cmocka_unit_test(test_arguments_of_calls),
      cmocka_unit_test(test_one_that_never_comes_is_named),
      cmocka_unit_test(test_a_failed_opening_leaves_the_rank_free),
      cmocka_unit_test(test_every_failed_call_is_survived),
  };
  return cmocka_run_group_tests_name("opening groups", tests, NULL, NULL);
}
