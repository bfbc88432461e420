/* Replaces open, mbind and get_mempolicy in the table of os/calls.h; fault_reset() undoes it. */
#include "support/nodes.h"

#include "os/calls.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static const char nodes[] = "/sys/devices/system/node";
static const char *root;
static nodes_call calls[NODES_MOST_CALLS];
static size_t count;
static int answer;
static int policy;

static int open_made_up(const char *path, int flags, mode_t mode) {
  char made_up[512];
  if (strncmp(path, nodes, sizeof nodes - 1) == 0) {
    (void)snprintf(made_up, sizeof made_up, "%s%s", root, path + sizeof nodes - 1);
    path = made_up;
  }
  return even_os_real.open(path, flags, mode);
}

void nodes_lie_in(const char *folder) {
  root = folder;
  even_os.open = open_made_up;
}

static int only_node(const unsigned long *mask, unsigned long most) {
  int found = -1;
  for (unsigned long node = 0; node + 1 < most; node++) { /* the kernel takes one bit less than it is told */
    if ((mask[node / (8 * sizeof *mask)] >> (node % (8 * sizeof *mask)) & 1u) != 0) {
      if (found >= 0) {
        return -1;
      }
      found = (int)node;
    }
  }
  return found;
}

static long note_mbind(void *address, size_t bytes, int mode, const unsigned long *mask, unsigned long most,
                       unsigned flags) {
  if (count < NODES_MOST_CALLS) {
    calls[count++] =
        (nodes_call){.address = address, .bytes = bytes, .mode = mode, .node = only_node(mask, most), .flags = flags};
  }
  errno = answer;
  return answer == 0 ? 0 : -1;
}

static long say_policy(int *mode, unsigned long *mask, unsigned long most, void *address, unsigned long flags) {
  (void)mask;
  (void)most;
  (void)address;
  (void)flags;
  *mode = policy;
  return 0;
}

void nodes_answer(int error_number, int mode) {
  count = 0;
  answer = error_number;
  policy = mode;
  even_os.mbind = note_mbind;
  even_os.get_mempolicy = say_policy;
}

size_t nodes_calls(const nodes_call **out) {
  *out = calls;
  return count;
}
