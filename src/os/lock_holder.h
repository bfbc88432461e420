/* Who holds a folder's lock, for messages. */
#ifndef EVEN_OS_LOCK_HOLDER_H
#define EVEN_OS_LOCK_HOLDER_H

#include "base/text.h"

#include <stdbool.h>

/* Adds "host node4: process 1234 (evenstep run train.py), which began at 2026-12-02 10:15:00" (local time): the process
 * of this host that has taken the lock of even_folder_lock, by /proc/locks (proc(5)), and still has the folder open.
 * `command`: with its command, at most 200 bytes of it, which may hold what is nobody else's: for who typed a command
 * alone, not for what is kept in logs. Adds nothing, and is no error, where that is not told: the process is another
 * host's, another user's, or of a container that is not seen from here; it has ended, and a child of it has the lock;
 * the file system numbers files in two ways (btrfs's subvolumes, some of overlayfs). Any thread. */
void even_lock_add_holder(const char *folder, bool command, even_text *out);

#endif
