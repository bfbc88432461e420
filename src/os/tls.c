/* OpenSSL over buffers in memory, with one pre-shared key and nothing else to choose from. */
#include "os/tls.h"

#include "base/alloc.h"
#include "base/fail.h"

#include <limits.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <string.h>

static const char IDENTITY[] = "evenstep-job";

struct even_tls {
  SSL_CTX *context;
  SSL *ssl; /* owns both buffers */
  BIO *in;
  BIO *out;
  bool server;
  bool ready;
  unsigned char key[EVEN_TLS_KEY_BYTES];
};

even_status even_tls_key_read(const char *digits, unsigned char key[EVEN_TLS_KEY_BYTES]) {
  size_t length = 0;
  if (OPENSSL_hexstr2buf_ex(key, EVEN_TLS_KEY_BYTES, &length, digits, '\0') != 1 || length != EVEN_TLS_KEY_BYTES) {
    ERR_clear_error();
    return even_fail(EVEN_ERR_INPUT, "a key that is not %d hexadecimal digits", 2 * EVEN_TLS_KEY_BYTES);
  }
  return EVEN_OK;
}

static even_status fail_of(even_status status, const char *what) {
  char words[256] = "no reason given";
  unsigned long code = ERR_peek_last_error();
  if (code != 0) {
    ERR_error_string_n(code, words, sizeof words);
  }
  ERR_clear_error();
  return even_fail(status, "%s: %s", what, words);
}

/* The key as TLS 1.3 takes it: the secret of a session, for the one cipher suite that both ends offer. */
static SSL_SESSION *session_make(SSL *ssl) {
  static const unsigned char suite[] = {0x13, 0x01}; /* TLS_AES_128_GCM_SHA256 */
  const even_tls *tls = SSL_get_app_data(ssl);
  const SSL_CIPHER *cipher = SSL_CIPHER_find(ssl, suite);
  SSL_SESSION *session = SSL_SESSION_new();
  if (session == NULL || cipher == NULL || SSL_SESSION_set1_master_key(session, tls->key, sizeof tls->key) != 1 ||
      SSL_SESSION_set_cipher(session, cipher) != 1 || SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) != 1) {
    SSL_SESSION_free(session);
    return NULL;
  }
  return session;
}

static int offer_key(SSL *ssl, const EVP_MD *digest, const unsigned char **identity, size_t *length,
                     SSL_SESSION **session) {
  (void)digest;
  *session = session_make(ssl);
  *identity = (const unsigned char *)IDENTITY;
  *length = sizeof IDENTITY - 1;
  return *session != NULL;
}

static int find_key(SSL *ssl, const unsigned char *identity, size_t length, SSL_SESSION **session) {
  *session = NULL;
  if (length != sizeof IDENTITY - 1 || memcmp(identity, IDENTITY, length) != 0) {
    return 1; /* there is no certificate either: the handshake ends */
  }
  *session = session_make(ssl);
  return *session != NULL;
}

static even_status set_up(even_tls *tls) {
  ERR_clear_error();
  tls->context = SSL_CTX_new(tls->server ? TLS_server_method() : TLS_client_method());
  if (tls->context == NULL || SSL_CTX_set_min_proto_version(tls->context, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_ciphersuites(tls->context, "TLS_AES_128_GCM_SHA256") != 1 ||
      SSL_CTX_set_num_tickets(tls->context, 0) != 1) {
    return fail_of(EVEN_ERR_UNSUPPORTED, "TLS 1.3 cannot be set up");
  }
  (void)SSL_CTX_set_options(tls->context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  (void)SSL_CTX_set_session_cache_mode(tls->context, SSL_SESS_CACHE_OFF);
  /* no certificate is good enough for the one that calls, and the other has none: the key alone counts */
  SSL_CTX_set_verify(tls->context, tls->server ? SSL_VERIFY_NONE : SSL_VERIFY_PEER, NULL);
  SSL_CTX_set_psk_use_session_callback(tls->context, offer_key);
  SSL_CTX_set_psk_find_session_callback(tls->context, find_key);
  tls->ssl = SSL_new(tls->context);
  tls->in = BIO_new(BIO_s_mem());
  tls->out = BIO_new(BIO_s_mem());
  if (tls->ssl == NULL || tls->in == NULL || tls->out == NULL) {
    BIO_free(tls->in);
    BIO_free(tls->out);
    return fail_of(EVEN_ERR_MEMORY, "TLS cannot be set up");
  }
  SSL_set_bio(tls->ssl, tls->in, tls->out);
  (void)SSL_set_app_data(tls->ssl, tls);
  if (tls->server) {
    SSL_set_accept_state(tls->ssl);
  } else {
    SSL_set_connect_state(tls->ssl);
  }
  return EVEN_OK;
}

even_status even_tls_open(bool server, const unsigned char key[EVEN_TLS_KEY_BYTES], even_tls **out) {
  even_tls *tls = NULL;
  *out = NULL;
  EVEN_TRY(EVEN_NEW(&tls));
  tls->server = server;
  memcpy(tls->key, key, sizeof tls->key);
  even_status status = set_up(tls);
  if (status != EVEN_OK) {
    even_tls_close(tls);
    return status;
  }
  *out = tls;
  return EVEN_OK;
}

void even_tls_close(even_tls *tls) {
  if (tls == NULL) {
    return;
  }
  SSL_free(tls->ssl);
  SSL_CTX_free(tls->context);
  OPENSSL_cleanse(tls->key, sizeof tls->key);
  even_free(tls);
}

even_status even_tls_feed(even_tls *tls, const void *bytes, size_t count) {
  if (count > INT_MAX || (count > 0 && BIO_write(tls->in, bytes, (int)count) != (int)count)) {
    return even_fail(EVEN_ERR_MEMORY, "%zu bytes of TLS could not be kept", count);
  }
  return EVEN_OK;
}

/* Whether more must come before anything goes on; else what went wrong. */
static even_status outcome(even_tls *tls, int result) {
  switch (SSL_get_error(tls->ssl, result)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE:
      return EVEN_OK;
    case SSL_ERROR_ZERO_RETURN:
      return EVEN_OK;
    default:
      return tls->ready ? fail_of(EVEN_ERR_INPUT, "what came over the connection is not TLS of this job")
                        : fail_of(EVEN_ERR_PERMISSION, "the other end does not have this job's key");
  }
}

static even_status shake_hands(even_tls *tls) {
  int result = SSL_do_handshake(tls->ssl);
  if (result != 1) {
    return outcome(tls, result);
  }
  if (SSL_session_reused(tls->ssl) != 1) { /* that is, by the key */
    return even_fail(EVEN_ERR_PERMISSION, "the other end does not have this job's key");
  }
  tls->ready = true;
  return EVEN_OK;
}

even_status even_tls_read(even_tls *tls, void *buffer, size_t room, size_t *got, bool *ended) {
  *got = 0;
  *ended = false;
  ERR_clear_error();
  if (!tls->ready) {
    EVEN_TRY(shake_hands(tls));
  }
  if (!tls->ready) {
    return EVEN_OK;
  }
  int result = SSL_read_ex(tls->ssl, buffer, room, got);
  if (result == 1) {
    return EVEN_OK;
  }
  *got = 0;
  even_status status = outcome(tls, result);
  *ended = status == EVEN_OK && (SSL_get_shutdown(tls->ssl) & SSL_RECEIVED_SHUTDOWN) != 0;
  return status;
}

bool even_tls_ready(const even_tls *tls) {
  return tls->ready;
}

even_status even_tls_write(even_tls *tls, const void *bytes, size_t count) {
  size_t written = 0;
  if (!tls->ready) {
    return even_fail(EVEN_ERR_STATE, "nothing can be sent before the handshake is done");
  }
  ERR_clear_error();
  if (count > 0 && (SSL_write_ex(tls->ssl, bytes, count, &written) != 1 || written != count)) {
    return fail_of(EVEN_ERR_SYSTEM, "TLS could not take what is to be sent");
  }
  return EVEN_OK;
}

void even_tls_end(even_tls *tls) {
  if (tls->ready) {
    (void)SSL_shutdown(tls->ssl);
    ERR_clear_error();
  }
}

size_t even_tls_take(even_tls *tls, void *buffer, size_t room) {
  int got = BIO_read(tls->out, buffer, room > INT_MAX ? INT_MAX : (int)room);
  return got > 0 ? (size_t)got : 0;
}

const char *even_tls_library(void) {
  return OpenSSL_version(OPENSSL_VERSION);
}
