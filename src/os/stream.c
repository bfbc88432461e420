/* Output and input streams over the table of calls. */
#include "os/stream.h"

#include "base/fail.h"
#include "os/calls.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>

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

even_status even_output_write_at(even_output *output, uint64_t offset, const void *data, size_t bytes) {
  const char *at = data;
  while (bytes > 0) {
    ssize_t written = even_os.pwrite(output->fd, at, bytes, (off_t)offset);
    if (written < 0 && errno == EINTR) {
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

even_status even_output_finish(even_output *output) {
  even_status status = EVEN_OK;
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

even_status even_input_read_at(even_input *input, uint64_t offset, void *buffer, size_t bytes) {
  char *at = buffer;
  while (bytes > 0) {
    ssize_t piece = even_os.pread(input->fd, at, bytes, (off_t)offset);
    if (piece < 0 && errno == EINTR) {
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
  }
  return EVEN_OK;
}

void even_input_close(even_input *input) {
  if (input->fd >= 0) {
    (void)even_os.close(input->fd);
    input->fd = -1;
  }
}
