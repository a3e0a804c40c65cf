"""The endpoint that agents talk to: sessions of episodes behind the APIs of three vendors."""
