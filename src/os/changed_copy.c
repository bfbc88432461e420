/* A file is copied piece by piece, with a change in one of them. */
#include "os/changed_copy.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/calls.h"
#include "os/file.h"

#include <errno.h>
#include <fcntl.h>

enum { PIECE_BYTES = 1 << 20 };

/* The next piece, PIECE_BYTES of it or up to the end; 0 bytes: there is none. */
static even_status read_piece(const char *path, int fd, unsigned char *piece, size_t wanted, size_t *got) {
  *got = 0;
  while (*got < wanted) {
    ssize_t more = even_os.read(fd, piece + *got, wanted - *got);
    if (more < 0 && errno == EINTR) {
      continue;
    }
    if (more < 0) {
      return even_fail_errno(errno, "%s cannot be read", path);
    }
    if (more == 0) {
      break;
    }
    *got += (size_t)more;
  }
  return EVEN_OK;
}

static even_status copy(const char *path, int from, int to, const even_file_change *change) {
  unsigned char *piece = NULL;
  uint64_t done = 0;
  size_t got = 0;
  EVEN_TRY(EVEN_NEW_ARRAY(&piece, PIECE_BYTES));
  even_status status = EVEN_OK;
  do {
    uint64_t left = change->bytes - done;
    status = read_piece(path, from, piece, left < PIECE_BYTES ? (size_t)left : PIECE_BYTES, &got);
    if (status == EVEN_OK && change->at >= done && change->at - done < got) {
      size_t at = (size_t)(change->at - done);
      piece[at] = (unsigned char)(piece[at] ^ change->xor);
    }
    status = status == EVEN_OK ? even_file_write_all(to, piece, got) : status;
    done += got;
  } while (status == EVEN_OK && got > 0);
  even_free(piece);
  return status;
}

static even_status copy_to(const char *path, int from, const char *temporary, const even_file_change *change) {
  (void)even_os.unlink(temporary);
  int to = even_os.open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (to < 0) {
    return even_fail_errno(errno, "%s cannot be created", temporary);
  }
  even_status status = copy(path, from, to, change);
  if (even_os.close(to) != 0 && status == EVEN_OK) {
    status = even_fail_errno(errno, "%s cannot be closed", temporary);
  }
  status = status == EVEN_OK ? even_file_rename(temporary, path) : status;
  if (status != EVEN_OK) {
    (void)even_os.unlink(temporary);
  }
  return status;
}

even_status even_file_put_changed(const char *path, const char *temporary, const even_file_change *change) {
  int from = even_os.open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC, 0);
  if (from < 0) {
    return even_fail_errno(errno, "%s cannot be opened", path);
  }
  even_status status = copy_to(path, from, temporary, change);
  (void)even_os.close(from);
  return status;
}
