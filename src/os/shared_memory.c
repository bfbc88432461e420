/* memfd segments, and files where there is no memfd. */
#include "os/shared_memory.h"

#include "base/checked.h"
#include "base/fail.h"
#include "os/calls.h"
#include "os/entries.h"
#include "os/shared_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* Where the system offers huge pages for shared memory on request (transparent_hugepage/shmem_enabled: advise): fewer
 * page faults and TLB misses. Small segments would take more memory than they need. */
#define LEAST_FOR_HUGE_PAGES ((size_t)8 << 20)

/* Segments that grow do so by whole pieces of this, so that a little more each time is no new mapping each time. */
enum { GROWTH = 1 << 20 };

static even_status map(even_shared_memory *memory) {
  void *address = even_os.mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
  if (address == MAP_FAILED) {
    return even_fail_errno(errno, "%zu bytes of shared memory could not be mapped", memory->bytes);
  }
  memory->address = address;
  if (memory->bytes >= LEAST_FOR_HUGE_PAGES) {
    (void)even_os.madvise(address, memory->bytes, MADV_HUGEPAGE);
  }
  return EVEN_OK;
}

/* What a kernel or a container's profile says that gives no memfd, and one that has no room in it. */
static bool gives_no_memfd(int error_number) {
  return error_number == ENOSYS || error_number == EPERM || error_number == EACCES;
}
static bool gives_no_room(int error_number) {
  return error_number == ENOSPC || error_number == ENOMEM || error_number == EPERM || error_number == EACCES;
}

/* A file, because of what has just failed. */
static even_status make_file(const char *label, size_t bytes, even_shared_memory *out) {
  const even_error why = *even_error_last();
  even_shared_memory_close(out);
  out->bytes = bytes;
  return even_shared_file_create(label, bytes, &out->fd) == EVEN_OK ? EVEN_OK : even_error_prefix("%.160s", why.what);
}

static even_status make_memory(const char *label, size_t bytes, even_shared_memory *out) {
  out->fd = even_os.memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (out->fd < 0) {
    int error_number = errno;
    even_status status = even_fail_errno(error_number, "a shared memory segment could not be made");
    return gives_no_memfd(error_number) ? make_file(label, bytes, out) : status;
  }
  if (even_os.ftruncate(out->fd, (off_t)bytes) != 0) {
    int error_number = errno;
    even_status status = even_fail_errno(error_number, "a shared memory segment could not grow to %zu bytes", bytes);
    return gives_no_room(error_number) ? make_file(label, bytes, out) : status;
  }
  (void)even_os.fchmod(out->fd, S_IRUSR | S_IWUSR); /* others cannot come by it anyway */
  /* Who shrinks a segment kills its peers by SIGBUS. Without seals it works as well, among friends. */
  (void)even_os.fcntl(out->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return EVEN_OK;
}

even_status even_shared_memory_create(const char *label, size_t bytes, even_shared_memory *out) {
  *out = (even_shared_memory){.fd = -1, .bytes = bytes};
  if (bytes == 0 || bytes > (size_t)INT64_MAX) {
    return even_fail(EVEN_ERR_ARGUMENT, "a shared memory segment of %zu bytes", bytes);
  }
  even_status status = make_memory(label, bytes, out);
  if (status == EVEN_OK) {
    status = map(out);
  }
  if (status != EVEN_OK) {
    even_shared_memory_close(out);
  }
  return status;
}

even_status even_shared_memory_begin(const char *label, even_shared_memory *out) {
  *out = (even_shared_memory){.fd = even_os.memfd_create(label, MFD_CLOEXEC)};
  return out->fd < 0 ? even_fail_errno(errno, "a shared memory segment could not be made") : EVEN_OK;
}

even_status even_shared_memory_take(int fd, even_shared_memory *out) {
  size_t bytes = 0;
  *out = (even_shared_memory){.fd = fd};
  even_status status = even_shared_memory_bytes(fd, &bytes);
  if (status == EVEN_OK && even_os.fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
    status = even_fail_errno(errno, "shared memory (descriptor %d) cannot be kept from other programs", fd);
  }
  if (status == EVEN_OK && bytes > 0) {
    out->bytes = bytes;
    status = map(out);
  }
  if (status != EVEN_OK) {
    even_shared_memory_close(out);
  }
  return status;
}

even_status even_shared_memory_grow(even_shared_memory *memory, size_t bytes) {
  even_shared_memory grown = {.fd = memory->fd};
  if (bytes <= memory->bytes) {
    return EVEN_OK;
  }
  if (!even_align_size(bytes, GROWTH, &grown.bytes) || grown.bytes > (size_t)INT64_MAX) {
    return even_fail(EVEN_ERR_OVERFLOW, "a shared memory segment of %zu bytes", bytes);
  }
  if (even_os.ftruncate(memory->fd, (off_t)grown.bytes) != 0) {
    return even_fail_errno(errno, "a shared memory segment could not grow to %zu bytes", grown.bytes);
  }
  EVEN_TRY(map(&grown));
  if (memory->address != NULL) {
    (void)even_os.munmap(memory->address, memory->bytes);
  }
  *memory = grown;
  return EVEN_OK;
}

even_status even_shared_memory_bytes(int fd, size_t *bytes) {
  struct stat facts;
  *bytes = 0;
  if (even_os.fstat(fd, &facts) != 0) {
    return even_fail_errno(errno, "shared memory (descriptor %d) cannot be read", fd);
  }
  *bytes = facts.st_size > 0 ? (size_t)facts.st_size : 0;
  return EVEN_OK;
}

/* `told`: the number by which the caller knows it. */
static even_status adopt(int fd, int told, even_shared_memory *out) {
  struct stat facts;
  *out = (even_shared_memory){.fd = fd};
  even_status status = EVEN_OK;
  if (even_os.fstat(fd, &facts) != 0) {
    status = even_fail_errno(errno, "shared memory (descriptor %d) cannot be read", told);
  } else if (facts.st_size <= 0) {
    status = even_fail(EVEN_ERR_INPUT, "shared memory (descriptor %d) is empty", told);
  } else {
    out->bytes = (size_t)facts.st_size;
    status = map(out);
  }
  if (status != EVEN_OK) {
    even_shared_memory_close(out);
  }
  return status;
}

even_status even_shared_memory_adopt(int fd, even_shared_memory *out) {
  return adopt(fd, fd, out);
}

even_status even_shared_memory_duplicate(int fd, even_shared_memory *out) {
  *out = (even_shared_memory){.fd = -1};
  int own = even_os.duplicate(fd);
  if (own < 0) {
    return even_fail_errno(errno, "shared memory (descriptor %d) cannot be duplicated", fd);
  }
  return adopt(own, fd, out);
}

/* Process numbers come anew to others, and a process of root can open anybody's: what another user made may be written
 * to, and cut short, by that user. */
static even_status check_owner(pid_t pid, int fd) {
  struct stat facts;
  if (even_os.fstat(fd, &facts) != 0) {
    return even_fail_errno(errno, "the shared memory of process %ld (descriptor %d) cannot be read", (long)pid, fd);
  }
  uid_t own = even_os.geteuid();
  if (facts.st_uid == own) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_PERMISSION,
                  "the shared memory of process %ld is user %ld's, this process is user %ld's: not trusted", (long)pid,
                  (long)facts.st_uid, (long)own);
  return even_error_fix("run all ranks of a host as one user; see what process %ld is", (long)pid);
}

even_status even_shared_memory_open_peer(pid_t pid, int fd, even_shared_memory *out) {
  char path[64];
  *out = (even_shared_memory){.fd = -1};
  (void)snprintf(path, sizeof path, "/proc/%ld/fd/%d", (long)pid, fd);
  int own = even_os.open(path, O_RDWR | O_CLOEXEC, 0);
  if (own < 0) {
    even_status status =
        even_fail_errno(errno, "the shared memory of process %ld (%s) cannot be opened", (long)pid, path);
    (void)even_error_fix("run all ranks of a host as one user and in one PID namespace (one container)");
    return status;
  }
  even_status status = check_owner(pid, own);
  if (status != EVEN_OK) {
    (void)even_os.close(own);
    return status;
  }
  return even_shared_memory_adopt(own, out);
}

typedef struct segments_of {
  pid_t pid;
  const char *label;
  bool (*each)(void *context, int fd, uint64_t identity);
  void *context;
} segments_of;

/* Where the kernel says that `path` of /proc leads. */
static bool read_link(const char *path, char *link, size_t bytes) {
  ssize_t length = even_os.readlink(path, link, bytes - 1);
  link[length < 0 ? 0 : length] = '\0';
  return length >= 0;
}

/* "/memfd:LABEL (deleted)" is what the link of a memfd says. */
static bool is_segment(const char *path, const char *label) {
  char link[128];
  char wanted[128];
  (void)snprintf(wanted, sizeof wanted, "/memfd:%s (deleted)", label);
  return read_link(path, link, sizeof link) && (strcmp(link, wanted) == 0 || even_shared_file_has_label(link, label));
}

bool even_shared_memory_has_label(int fd, const char *label) {
  char path[64];
  (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  return is_segment(path, label);
}

bool even_shared_memory_is_file(int fd, char *folder, size_t bytes) {
  char path[64];
  char link[128];
  (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  return read_link(path, link, sizeof link) && even_shared_file_folder(link, folder, bytes);
}

static bool offer_segment(void *context, const char *name) {
  const segments_of *segments = context;
  char path[320];
  struct stat facts;
  bool more = true;
  (void)snprintf(path, sizeof path, "/proc/%ld/fd/%s", (long)segments->pid, name);
  int fd = is_segment(path, segments->label) ? even_os.open(path, O_RDWR | O_CLOEXEC, 0) : -1;
  if (fd >= 0) {
    if (even_os.fstat(fd, &facts) == 0) {
      more = segments->each(segments->context, fd, (uint64_t)facts.st_ino);
    }
    (void)even_os.close(fd);
  }
  return more;
}

even_status even_shared_memory_each(pid_t pid, const char *label,
                                    bool (*each)(void *context, int fd, uint64_t identity), void *context) {
  segments_of segments = {pid, label, each, context};
  char path[64];
  (void)snprintf(path, sizeof path, "/proc/%ld/fd", (long)pid);
  return even_folder_each(path, offer_segment, &segments);
}

/* In parts, which take memory one after the other. */
static void copy_saying(const even_shared_memory *from, char *to, size_t said_at) {
  enum { PART = 1 << 22 };
  _Atomic uint64_t *said = (_Atomic uint64_t *)(void *)((char *)from->address + said_at);
  for (size_t done = 0; done < from->bytes;) {
    size_t part = from->bytes - done < PART ? from->bytes - done : PART;
    memcpy(to + done, (const char *)from->address + done, part);
    done += part;
    atomic_store(said, done);
  }
}

even_status even_shared_memory_leave(even_shared_memory *memory, size_t said_at, even_shared_memory *was) {
  enum { READ_WRITE = PROT_READ | PROT_WRITE };
  *was = (even_shared_memory){.fd = memory->fd, .bytes = memory->bytes};
  even_status status = map(was);
  if (status == EVEN_OK && even_os.mmap(memory->address, memory->bytes, READ_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
    status = even_fail_errno(errno, "%zu bytes of shared memory could not be copied", memory->bytes);
    /* the kernel may have taken away what lay there before it found no room */
    (void)even_os.mmap(memory->address, memory->bytes, READ_WRITE, MAP_SHARED | MAP_FIXED, memory->fd, 0);
  }
  if (status != EVEN_OK) {
    was->fd = -1; /* is the other one's */
    even_shared_memory_close(was);
    return status;
  }
  copy_saying(was, memory->address, said_at);
  memory->fd = -1;
  return EVEN_OK;
}

void even_shared_memory_rewind(const even_shared_memory *memory) {
  (void)even_os.lseek(memory->fd, 0, SEEK_SET);
}

void even_shared_memory_close(even_shared_memory *memory) {
  if (memory->address != NULL) {
    (void)even_os.munmap(memory->address, memory->bytes);
  }
  if (memory->fd >= 0) {
    (void)even_os.close(memory->fd);
  }
  *memory = (even_shared_memory){.fd = -1};
}
