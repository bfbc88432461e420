/* Output and input streams over the table of calls. */
#include "os/stream.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/direct_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/fs.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

/* f_type of statfs(2) for file systems that write past the page cache what several threads give them. */
#define TYPE_EXT4 0xEF53
#define TYPE_XFS 0x58465342

even_status even_output_create(const char *path, even_output *out) {
  *out = (even_output){.fd = -1, .path = path};
  out->fd = even_os.open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (out->fd < 0) {
    return even_fail_errno(errno, "%s cannot be created", path);
  }
  return EVEN_OK;
}

even_status even_output_write(even_output *output, const void *data, size_t bytes) {
  const char *at = data;
  while (bytes > 0) {
    ssize_t written = even_os.write(output->fd, at, bytes);
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) { /* 0 for a file means that it will never go on */
      return even_fail_errno(written < 0 ? errno : EIO, "%s cannot be written beyond its first %" PRIu64 " bytes",
                             output->path, output->bytes);
    }
    at += written;
    bytes -= (size_t)written;
    output->bytes += (uint64_t)written;
  }
  return EVEN_OK;
}

static bool gains_by_direct(int fd) {
  struct statfs facts;
  return even_os.fstatfs(fd, &facts) == 0 && (facts.f_type == TYPE_EXT4 || facts.f_type == TYPE_XFS);
}

void even_output_go_direct(even_output *output) {
  if (!gains_by_direct(output->fd)) {
    return;
  }
  int fd = even_os.open(output->path, O_WRONLY | O_DIRECT | O_CLOEXEC, 0);
  if (fd == 0) { /* the program has closed its input */
    (void)even_os.close(fd);
  } else if (fd > 0) {
    output->direct = fd;
  }
}

bool even_output_is_direct(const even_output *output) {
  return output->direct > 0;
}

/* Blocks that are there already are written side by side; those that make the file longer are not. */
even_status even_output_make_room(even_output *output, uint64_t offset, uint64_t bytes) {
  int failed = 0;
  if (!even_output_is_direct(output) || bytes > (uint64_t)INT64_MAX || offset > (uint64_t)INT64_MAX - bytes) {
    return EVEN_OK;
  }
  do {
    failed = even_os.fallocate(output->fd, 0, (off_t)offset, (off_t)bytes);
  } while (failed != 0 && errno == EINTR);
  if (failed != 0 && errno != EOPNOTSUPP && errno != ENOSYS) {
    return even_fail_errno(errno, "%s cannot be given room for its %" PRIu64 " bytes", output->path, bytes);
  }
  return EVEN_OK;
}

static bool is_aligned(const void *data, uint64_t offset, size_t bytes) {
  return ((uintptr_t)data | offset | bytes) % EVEN_DIRECT_ALIGNMENT == 0;
}

even_status even_output_write_at(even_output *output, uint64_t offset, const void *data, size_t bytes) {
  const char *at = data;
  bool may_be_direct = even_output_is_direct(output);
  while (bytes > 0) {
    bool direct = may_be_direct && is_aligned(at, offset, bytes);
    ssize_t written = even_os.pwrite(direct ? output->direct : output->fd, at, bytes, (off_t)offset);
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written < 0 && errno == EINVAL && direct) { /* a device that wants more than our alignment */
      may_be_direct = false;
      continue;
    }
    if (written <= 0) {
      return even_fail_errno(written < 0 ? errno : EIO, "%s cannot be written at byte %" PRIu64, output->path, offset);
    }
    at += written;
    offset += (uint64_t)written;
    bytes -= (size_t)written;
  }
  return EVEN_OK;
}

static void close_direct(even_output *output) {
  if (even_output_is_direct(output)) {
    (void)even_os.close(output->direct); /* what fails is told by the fsync */
    output->direct = 0;
  }
}

even_status even_output_finish(even_output *output) {
  even_status status = EVEN_OK;
  close_direct(output);
  if (even_os.fsync(output->fd) != 0) {
    status = even_fail_errno(errno, "%s (%" PRIu64 " bytes) cannot be synced to its disk", output->path, output->bytes);
  }
  if (even_os.close(output->fd) != 0 && status == EVEN_OK) {
    status = even_fail_errno(errno, "%s cannot be closed", output->path);
  }
  output->fd = -1;
  if (status != EVEN_OK) {
    (void)even_os.unlink(output->path);
  }
  return status;
}

void even_output_drop(even_output *output) {
  close_direct(output);
  if (output->fd >= 0) {
    (void)even_os.close(output->fd);
    (void)even_os.unlink(output->path);
    output->fd = -1;
  }
}

even_status even_input_open(const char *path, even_input *out) {
  struct stat facts;
  *out = (even_input){.fd = -1, .path = path};
  /* O_NONBLOCK: opening a FIFO must not hang; it changes nothing for files */
  out->fd = even_os.open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
  if (out->fd < 0) {
    return even_fail_errno(errno, "%s cannot be opened", path);
  }
  even_status status = EVEN_OK;
  if (even_os.fstat(out->fd, &facts) != 0) {
    status = even_fail_errno(errno, "%s cannot be read", path);
  } else if (!S_ISREG(facts.st_mode)) {
    status = even_fail(EVEN_ERR_INPUT, "%s is not a file", path);
  } else {
    out->bytes = (uint64_t)facts.st_size;
  }
  if (status != EVEN_OK) {
    even_input_close(out);
  }
  return status;
}

even_status even_input_read(even_input *input, void *buffer, size_t bytes, size_t *got) {
  char *at = buffer;
  *got = 0;
  while (bytes > 0) {
    ssize_t piece = even_os.read(input->fd, at, bytes);
    if (piece < 0 && errno == EINTR) {
      continue;
    }
    if (piece < 0) {
      return even_fail_errno(errno, "%s cannot be read", input->path);
    }
    if (piece == 0) {
      break;
    }
    at += piece;
    bytes -= (size_t)piece;
    *got += (size_t)piece;
  }
  return EVEN_OK;
}

void even_input_go_direct(even_input *input) {
  if (input->bytes == 0 || input->bytes > SIZE_MAX || !gains_by_direct(input->fd)) {
    return;
  }
  int fd = even_os.open(input->path, O_RDONLY | O_DIRECT | O_CLOEXEC | O_NONBLOCK, 0);
  if (fd <= 0) {
    if (fd == 0) { /* the program has closed its input */
      (void)even_os.close(fd);
    }
    return;
  }
  void *map = even_os.mmap(NULL, (size_t)input->bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, input->fd, 0);
  input->direct = fd;
  input->map = map == MAP_FAILED ? NULL : map;
}

bool even_input_is_cached(const even_input *input, uint64_t offset, size_t bytes) {
  unsigned char pages[256];
  const long said = even_os.sysconf(_SC_PAGESIZE);
  if (input->map == NULL || said <= 0) {
    return true;
  }
  const size_t page = (size_t)said;
  const size_t most = sizeof pages * page;
  const size_t end = (size_t)offset + bytes;
  for (size_t at = (size_t)offset - (size_t)offset % page; at < end; at += most) { /* pages may be more than a block */
    size_t part = end - at < most ? end - at : most;
    if (even_os.mincore((char *)input->map + at, part, pages) != 0) {
      return true;
    }
    for (size_t i = 0; i < (part + page - 1) / page; i++) {
      if ((pages[i] & 1) == 0) {
        return false;
      }
    }
  }
  return true;
}

/* How much of what is wanted comes past the page cache: whole blocks, or 0. */
static size_t direct_part(const even_input *input, uint64_t offset, const void *buffer, size_t bytes) {
  size_t blocks = bytes - bytes % EVEN_DIRECT_ALIGNMENT;
  bool may = input->direct > 0 && blocks > 0 && is_aligned(buffer, offset, blocks) && offset + blocks <= input->bytes;
  return may && !even_input_is_cached(input, offset, blocks) ? blocks : 0;
}

even_status even_input_read_at(even_input *input, uint64_t offset, void *buffer, size_t bytes) {
  char *at = buffer;
  size_t direct = direct_part(input, offset, buffer, bytes);
  while (bytes > 0) {
    ssize_t piece = direct > 0 ? even_os.pread(input->direct, at, direct, (off_t)offset)
                               : even_os.pread(input->fd, at, bytes, (off_t)offset);
    if (piece < 0 && errno == EINTR) {
      continue;
    }
    if (piece < 0 && errno == EINVAL && direct > 0) { /* a device that wants more than our alignment */
      direct = 0;
      continue;
    }
    if (piece < 0) {
      return even_fail_errno(errno, "%s cannot be read", input->path);
    }
    if (piece == 0) {
      return even_fail(EVEN_ERR_CORRUPT, "%s ends too early", input->path);
    }
    at += piece;
    offset += (uint64_t)piece;
    bytes -= (size_t)piece;
    direct = direct > (size_t)piece && (size_t)piece % EVEN_DIRECT_ALIGNMENT == 0 ? direct - (size_t)piece : 0;
  }
  return EVEN_OK;
}

void even_input_close(even_input *input) {
  if (input->map != NULL) {
    (void)even_os.munmap(input->map, (size_t)input->bytes);
    input->map = NULL;
  }
  if (input->direct > 0) {
    (void)even_os.close(input->direct);
    input->direct = 0;
  }
  if (input->fd >= 0) {
    (void)even_os.close(input->fd);
    input->fd = -1;
  }
}

bool even_output_share(even_output *output, const even_input *input, uint64_t offset, uint64_t bytes) {
  struct file_clone_range range = {
      .src_fd = input->fd, .src_offset = offset, .src_length = bytes, .dest_offset = offset};
  int failed = 0;
  if (bytes == 0) { /* which would mean: up to the end */
    return false;
  }
  do {
    failed = even_os.ioctl(output->fd, FICLONERANGE, &range);
  } while (failed != 0 && errno == EINTR);
  return failed == 0;
}
