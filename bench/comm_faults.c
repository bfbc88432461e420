/* How fast the ranks of a group learn that one of them was killed or stopped inside a call: from the signal to each
 * survivor's error, over many tries with 2 to 4 ranks, and whether anything is left behind.
 *
 * comm_faults [TRIES [ENGINE]]: so many of each kind (1000), over "shm" or "ucx" (TCP; without UCX it is left out), or
 * both. Exit code 1 where an error was wrong or something was left. */
#include <evenstep/comm.h>
#include <evenstep/telemetry.h>

#include <dirent.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST_RANKS 4
#define BYTES ((size_t)4 << 20)
#define WORKS 6

typedef struct rank_report {
  _Atomic uint32_t rounds; /* calls made */
  uint64_t failed_ns;
  int right; /* the error was the right one */
  int left;  /* descriptors or mappings after closing, above those before opening */
} rank_report;

static const char *const work_names[WORKS] = {
    "all_reduce of 1 KB", "all_reduce of 4 MB", "all_reduce in the arena", "broadcast of 1 MB", "barrier",
    "messages of 64 KB"};

static int entries_of(const char *path) {
  int count = 0;
  DIR *folder = opendir(path);
  while (folder != NULL && readdir(folder) != NULL) {
    count++;
  }
  if (folder != NULL) {
    (void)closedir(folder);
  }
  return count;
}

static int group_mappings(void) {
  char line[512];
  int count = 0;
  FILE *maps = fopen("/proc/self/maps", "r");
  while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
    count += strstr(line, "evenstep-group") != NULL;
  }
  if (maps != NULL) {
    (void)fclose(maps);
  }
  return count;
}

static int held(void) {
  return entries_of("/proc/self/fd") + group_mappings();
}

static even_status pass_on(even_comm *comm, char *data) {
  int ranks = even_comm_ranks(comm);
  int own = even_comm_rank(comm);
  even_comm_request *out = NULL;
  even_comm_request *in = NULL;
  even_status status = even_comm_send_begin(comm, data, 65536, (own + 1) % ranks, 1, &out);
  if (status == EVEN_OK) {
    status = even_comm_receive_begin(comm, data + 65536, 65536, (own + ranks - 1) % ranks, 1, &in);
  }
  if (status == EVEN_OK) {
    status = even_comm_request_wait(in, 0, NULL);
  }
  if (status == EVEN_OK) {
    status = even_comm_request_wait(out, 0, NULL);
  }
  even_comm_request_free(in);
  even_comm_request_free(out);
  return status;
}

static even_status work(even_comm *comm, int kind, char *data) {
  switch (kind) {
    case 0:
      return even_comm_all_reduce(comm, data, 256, EVEN_F32, EVEN_MAX);
    case 1:
      return even_comm_all_reduce(comm, data, BYTES / 4, EVEN_F32, EVEN_MAX);
    case 2:
      return even_comm_all_reduce(comm, even_comm_arena(comm), BYTES / 4, EVEN_F32, EVEN_MAX);
    case 3:
      return even_comm_broadcast(comm, data, (size_t)1 << 20, 0);
    case 4:
      return even_comm_barrier(comm);
    default:
      return pass_on(comm, data);
  }
}

static even_status gather(void *context, const void *mine, size_t bytes, void *all) {
  const size_t counts[MOST_RANKS] = {bytes, bytes, bytes, bytes};
  return even_comm_all_gather(context, mine, all, counts, EVEN_U8);
}

static even_status gather_alone(void *context, const void *mine, size_t bytes, void *all) {
  (void)context;
  memcpy(all, mine, bytes);
  return EVEN_OK;
}

/* What UCX keeps for the process once it was opened is nothing that a group leaves behind. */
static even_status open_once(void) {
  even_comm_params params = {.size = sizeof params, .ranks = 1, .timeout_seconds = 60, .spin = -1};
  even_comm_network network = {.size = sizeof network, .gather = gather_alone, .number = -1};
  even_comm *comm = NULL;
  even_status status = even_comm_open_ucx(&params, &network, &comm);
  even_comm_close(comm);
  return status;
}

static even_status open_ucx(const even_comm_params *params, int fd, even_comm **out) {
  even_comm *meeting = NULL;
  even_status status = even_comm_open(params, fd, &meeting);
  if (status == EVEN_OK) {
    even_comm_network network = {.size = sizeof network, .gather = gather, .context = meeting, .number = -1};
    status = even_comm_open_ucx(params, &network, out);
  }
  if (status == EVEN_OK) {
    status = even_comm_barrier(meeting);
  }
  even_comm_close(meeting);
  return status;
}

/* Where a message's request is freed after its failure the error is still the thread's last one: freeing records none.
 */
static void be_rank(bool ucx, even_comm_params params, int fd, int kind, int victim, rank_report *report) {
  char *data = calloc(1, BYTES);
  even_comm *comm = NULL;
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  bool ready = data != NULL && (!ucx || open_once() == EVEN_OK);
  int before = held();
  if (!ready || (ucx ? open_ucx(&params, fd, &comm) : even_comm_open(&params, fd, &comm)) != EVEN_OK) {
    (void)fprintf(stderr, "rank %d cannot open: %s\n", params.rank, even_error_last()->what);
    atomic_store(&report->rounds, 1000u);
    _exit(1);
  }
  while (work(comm, kind, data) == EVEN_OK) {
    atomic_fetch_add(&report->rounds, 1u);
  }
  report->failed_ns = even_clock_ns();
  const even_error *error = even_error_last();
  report->right = error->status == EVEN_ERR_PEER_LOST && error->rank == victim;
  if (!report->right) {
    (void)fprintf(stderr, "rank %d: %s\n", params.rank, error->what);
  }
  even_comm_close(comm);
  report->left = held() - before;
  free(data);
  _exit(0);
}

static void pause_ns(long ns) {
  const struct timespec time = {0, ns};
  (void)nanosleep(&time, NULL);
}

/* One try; the survivors' times in seconds go to `times`. Returns how many, -1 where something was wrong. */
static int try_once(bool ucx, int try_number, int number, rank_report *reports, double *times) {
  int ranks = 2 + try_number % (MOST_RANKS - 1);
  int victim = rand() % ranks;
  int fd = -1;
  int count = 0;
  pid_t processes[MOST_RANKS];
  even_comm_params params = {
      .size = sizeof params, .ranks = ranks, .arena_bytes = BYTES, .timeout_seconds = 60, .spin = -1};
  memset(reports, 0, MOST_RANKS * sizeof *reports);
  if (even_comm_create_segment(&params, &fd) != EVEN_OK) {
    return -1;
  }
  (void)fflush(NULL);
  for (int rank = 0; rank < ranks; rank++) {
    processes[rank] = fork();
    if (processes[rank] == 0) {
      params.rank = rank;
      be_rank(ucx, params, fd, try_number / (MOST_RANKS - 1) % WORKS, victim, &reports[rank]);
    }
  }
  (void)close(fd);
  for (int rank = 0; rank < ranks; rank++) {
    while (atomic_load(&reports[rank].rounds) < 3) {
      pause_ns(200000);
    }
  }
  pause_ns(rand() % 10000000);
  uint64_t signalled_ns = even_clock_ns();
  (void)kill(processes[victim], number);
  for (int rank = 0; rank < ranks; rank++) {
    if (rank != victim) {
      (void)waitpid(processes[rank], NULL, 0);
    }
  }
  (void)kill(processes[victim], SIGKILL);
  (void)waitpid(processes[victim], NULL, 0);
  for (int rank = 0; rank < ranks; rank++) {
    if (rank != victim) {
      if (!reports[rank].right || reports[rank].left != 0) {
        return -1;
      }
      times[count++] = (double)(reports[rank].failed_ns - signalled_ns) * 1e-9;
    }
  }
  return count;
}

static int compare(const void *a, const void *b) {
  double left = *(const double *)a;
  double right = *(const double *)b;
  return (left > right) - (left < right);
}

static int run(bool ucx, const char *name, int number, int tries, rank_report *reports) {
  double *times = calloc((size_t)tries * MOST_RANKS, sizeof *times);
  int count = 0;
  int wrong = 0;
  for (int i = 0; times != NULL && i < tries; i++) {
    int got = try_once(ucx, i, number, reports, times + count);
    count += got > 0 ? got : 0;
    wrong += got < 0;
  }
  if (count > 0) {
    qsort(times, (size_t)count, sizeof *times, compare);
    (void)printf("%-6s %-8s %6d %9d %9.1f %9.1f %9.1f %6d\n", ucx ? "ucx" : "shm", name, tries, count,
                 times[count / 2] * 1e3, times[(size_t)((double)count * 0.99)] * 1e3, times[count - 1] * 1e3, wrong);
  }
  free(times);
  return wrong + (count == 0);
}

/* In a process of its own: what UCX starts when it is opened does not survive a fork. */
static bool have_ucx(void) {
  int status = 1;
  (void)setenv("UCX_TLS", "tcp,self", 0);
  (void)setenv("UCX_HANDLE_ERRORS", "none", 0);
  (void)setenv("UCX_LOG_LEVEL", "error", 0);
  (void)fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    char version[32];
    _exit(even_comm_ucx_version(NULL, version, sizeof version) == EVEN_OK ? 0 : 1);
  }
  (void)waitpid(child, &status, 0);
  return status == 0;
}

int main(int argument_count, char **arguments) {
  int tries = argument_count > 1 ? atoi(arguments[1]) : 1000;
  int descriptors = entries_of("/proc/self/fd");
  int shared = entries_of("/dev/shm");
  rank_report *reports =
      mmap(NULL, MOST_RANKS * sizeof *reports, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (reports == MAP_FAILED || tries < 1) {
    (void)fprintf(stderr, "comm_faults [TRIES [ENGINE]]\n");
    return 2;
  }
  double load[1] = {0};
  (void)getloadavg(load, 1);
  srand(1);
  (void)printf("%ld cores, %.1f other tasks wanted one in the minute before.\n", sysconf(_SC_NPROCESSORS_ONLN),
               load[0]);
  (void)printf("A rank of 2 to 4 is signalled inside a call (");
  for (int kind = 0; kind < WORKS; kind++) {
    (void)printf("%s%s", kind == 0 ? "" : ", ", work_names[kind]);
  }
  (void)printf(");\nfrom the signal to each survivor's error, which must name it:\n\n");
  (void)printf("engine signal    tries survivors median/ms    p99/ms    max/ms  wrong\n");
  int wrong = 0;
  for (int ucx = 0; ucx < 2; ucx++) {
    bool wanted = argument_count < 3 || strcmp(arguments[2], ucx ? "ucx" : "shm") == 0;
    if (wanted && (!ucx || have_ucx())) {
      wrong += run(ucx, "SIGKILL", SIGKILL, tries, reports);
      wrong += run(ucx, "SIGSTOP", SIGSTOP, tries, reports);
    }
  }
  int left = entries_of("/proc/self/fd") - descriptors + entries_of("/dev/shm") - shared + group_mappings();
  (void)printf(
      "\nleft behind (descriptors, mappings, files in /dev/shm; of each survivor after closing, of all at the "
      "end): %d\n",
      left);
  return wrong != 0 || left != 0;
}
