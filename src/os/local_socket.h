/* Connections between processes of one user on one host: a Unix socket in a folder, mode 0600. */
#ifndef EVEN_OS_LOCAL_SOCKET_H
#define EVEN_OS_LOCAL_SOCKET_H

#include <evenstep/status.h>

/* Listens at FOLDER/NAME, whatever the folder's length; what lies there under that name is replaced. *fd
 * (close-on-exec) is the caller's: even_pipe_close closes it, even_file_remove removes the name. */
even_status even_local_socket_listen(const char *folder, const char *name, int *fd) EVEN_MUST_USE;
/* The next connection that waits (non-blocking); *fd -1: none does. One of another user (but for root) is closed, which
 * is no error: the file's mode has kept others out already where the file system knows modes. */
even_status even_local_socket_accept(int listener, int *fd) EVEN_MUST_USE;
/* Connects; reads and writes wait. EVEN_ERR_NOT_FOUND: nobody listens there. EVEN_ERR_PERMISSION: it is another user's.
 */
even_status even_local_socket_connect(const char *folder, const char *name, int *fd) EVEN_MUST_USE;

#endif
